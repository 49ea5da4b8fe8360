"""Drafts under a grammar: what it forbids is cut before verification, what it forces is drafted for free."""

from collections.abc import Sequence

from agentspec.cache.growing import GrowingTree
from agentspec.engine.constraint import Constraint
from agentspec.types import DraftTree, Origin

GRAMMAR = str(Origin.GRAMMAR.name).lower()

LONG = 4096
"""Finding a forced run takes time that grows with its length: one of so many tokens is the request's last draft."""


def add_chain(grown: GrowingTree, parent: int, tokens: Sequence[int], budget: int, depth: int) -> None:
    """Forced tokens below a node, until there are `budget` nodes beside the root, and none below `depth`."""
    for token in tokens:
        full = len(grown.token) > budget and (parent, token) not in grown.child
        if full or grown.depth[parent] >= depth:
            return
        parent = grown.add(parent, token, 0.0, Origin.GRAMMAR)


def constrained(tree: DraftTree, constraint: Constraint, budget: int, depth: int, *, forcing: bool) -> DraftTree:
    """The nodes of `tree` that the grammar allows; with `forcing`, also the tokens that it forces after the root and
    after the likeliest leaf. At most `budget` nodes beside the root, none below `depth`.

    The constraint's own state is left alone, so drafting cannot change a choice.
    """
    grown = GrowingTree(tree.token[0])
    chain = forced(constraint, []) if forcing else []
    add_chain(grown, 0, chain, budget, depth)
    placed = {0: 0}
    for node in allowed_nodes(tree, constraint):
        parent = placed.get(tree.parent[node])
        at = tree.depth[node] - 1
        off_chain = at < len(chain) and tree.token[node] != chain[at]
        if parent is None or off_chain:
            continue
        if len(grown.token) <= budget or (parent, tree.token[node]) in grown.child:
            placed[node] = grown.add(parent, tree.token[node], tree.logp[node], tree.origin[node])
    leaf = grown.best_leaf()
    if forcing and leaf and grown.depth[leaf] < depth and len(grown.token) <= budget:
        add_chain(grown, leaf, forced(constraint, grown.path(leaf)), budget, depth)
    return grown.tree()


def allowed_nodes(tree: DraftTree, constraint: Constraint) -> list[int]:
    """Nodes beside the root whose whole path the grammar allows, parents first."""
    if len(tree) == 1:
        return []
    matcher = constraint.fork()
    allowed: set[int] = set()
    inner = set(tree.parent)
    for leaf in range(1, len(tree)):
        if leaf in inner:
            continue
        path = path_to(tree, leaf)
        allowed.update(path[: matcher.validate_tokens([tree.token[node] for node in path])])
    return sorted(allowed)


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Nodes from below the root down to `node`."""
    path: list[int] = []
    while node > 0:
        path.append(node)
        node = tree.parent[node]
    return path[::-1]


def forced(constraint: Constraint, path: list[int]) -> list[int]:
    """Tokens that must follow the committed ones and `path`; empty where there is a choice, or the end may come."""
    if not constraint.forces:
        return []
    matcher = constraint.fork()
    tokens: list[int] = []
    if matcher.consume_tokens(path) and not matcher.is_stopped():
        tokens = matcher.compute_ff_tokens()
    constraint.forces = len(tokens) < LONG
    return tokens
