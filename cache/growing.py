"""A draft tree while nodes are still added to it."""

from collections.abc import Sequence

from agentspec.types import DraftTree


class GrowingTree:
    """A draft tree under construction."""

    def __init__(self, root: int) -> None:
        self.token, self.parent, self.depth = [root], [-1], [0]
        self.logp, self.cum, self.origin = [0.0], [0.0], [0]
        self.child: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, logp: float, origin: int) -> int:
        """The child of `parent` with `token`; one that is there already gains a source."""
        known = self.child.get((parent, token))
        if known is not None:
            self.origin[known] |= origin
            return known
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.logp.append(logp)
        self.cum.append(self.cum[parent] + logp)
        self.origin.append(origin)
        node = self.child[parent, token] = len(self.token) - 1
        return node

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Nodes of the longest beginning of `tokens` that the tree has, from the root's child on."""
        nodes, node = list[int](), 0
        for token in tokens:
            child = self.child.get((node, token))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to a node."""
        tokens: list[int] = []
        while node:
            tokens.append(self.token[node])
            node = self.parent[node]
        return tokens[::-1]

    def best_leaf(self) -> int:
        """The likeliest node without children; the first of those that are equally likely."""
        inner = set(self.parent)
        return max((node for node in range(len(self.token)) if node not in inner), key=lambda node: self.cum[node])

    def tree(self) -> DraftTree:
        columns = (self.token, self.parent, self.depth, self.logp, self.cum, self.origin)
        return DraftTree(*(tuple(column) for column in columns))  # type: ignore[arg-type]
