"""Who holds which page: a radix tree over the pages of every scope, and the pool that keeps the limit.

A sequence puts each page into the tree as it fills up, and others of its scope hold it too while they run; what
nobody runs on leaves when memory is short, least recently used first (RadixAttention, Zheng et al. 2024, with nodes of
one page each).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from agentspec.config import PrefixSharing
from agentspec.engine.kv import Page, PageSource, PageTable, pages_of
from agentspec.kernels.cpu.attend import PAGE
from agentspec.types import Scope

WIDTH = 4
"""Bytes of a token in a key."""

MAX_TIPS = 256
"""Trajectories noted at one page; what more of them have in common belongs to none, and leaves with age."""

Owner = tuple[Scope, str]
"""A trajectory: its scope and its id."""


@dataclass(eq=False, slots=True)
class Node:
    """A page in the tree. Its key, the page's tokens as bytes, is a whole page of them but for some leaves."""

    key: bytes
    page: Page | None
    """None for a root."""

    parent: "Node | None"
    children: dict[bytes, "Node"] = field(default_factory=dict)
    tips: set["Owner"] = field(default_factory=set)
    """Trajectories that have a turn which was computed up to here."""


@dataclass(eq=False, slots=True)
class Holding:
    """A running sequence's pages, of which the first `depth` are those on the way to `node` in the tree."""

    table: PageTable
    node: Node
    depth: int = 0


def key_of(tokens: Sequence[int]) -> bytes:
    """Tokens as a key."""
    return np.asarray(tokens, dtype=np.int32).tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens that two keys share."""
    size = min(len(a), len(b)) // WIDTH
    if a[:WIDTH] != b[:WIDTH]:
        return 0
    if a[: size * WIDTH] == b[: size * WIDTH]:
        return size
    different = np.flatnonzero(np.frombuffer(a, np.int32, size) != np.frombuffer(b, np.int32, size))
    return int(different[0])


def pages_in(holdings: Collection[Holding]) -> set[Page | None]:
    """The pages of some sequences, shared ones once."""
    return {page for holding in holdings for page in holding.table.pages}


class KVPool:
    """All pages of a worker. Not thread-safe: the engine's thread owns it."""

    def __init__(self, shape: PageSource, limit_bytes: int, sharing: PrefixSharing = PrefixSharing.SCOPE) -> None:
        self.shape = shape
        self.sharing = sharing
        self.limit = limit_bytes // shape.page_bytes
        """Most pages at once."""

        self.pages = 0
        """Pages that exist: those of running sequences and those that only the tree holds."""

        self.evicted = 0
        self.running: list[Holding] = []
        self.roots: dict[Scope | None, Node] = {}
        self.tips: dict[Owner, set[Node]] = {}
        """Where the turns of each trajectory end in the tree: their pages are on the way there."""

        self._recent: dict[Node, None] = {}
        """All nodes, least recently used first; a node comes before its parent."""

    @property
    def held(self) -> int:
        """Pages that running sequences hold, shared ones once."""
        return len(pages_in(self.running))

    def admits(self, scope: Scope, tokens: Sequence[int], leaving: Collection[Holding] = ()) -> bool:
        """Whether a sequence of `tokens` can be computed beside the running ones but for those `leaving`, each with a
        page to grow by."""
        staying = [holding for holding in self.running if holding not in leaving]
        if not staying:
            return True
        held = pages_in(staying)
        shared, _ = self._match(self._root(scope), key_of(tokens[:-1]))
        known = sum(1 for node in shared if node.page in held)
        return len(held) + pages_of(len(tokens)) - known + len(staying) <= self.limit

    def acquire(self, scope: Scope, tokens: Sequence[int]) -> Holding:
        """Pages for a sequence: the longest known prefix of all but its last token is committed already."""
        root = self._root(scope)
        nodes, partial = self._match(root, key_of(tokens)[:-WIDTH])
        holding = Holding(PageTable(self.shape), nodes[-1] if nodes else root, len(nodes))
        for node in nodes:
            holding.table.pages.append(self._held_page(node))
        holding.table.length = len(nodes) * PAGE
        self.running.append(holding)
        self._touch(holding.node)
        if partial is not None:
            self._copy_part(holding, *partial)
        return holding

    def _copy_part(self, holding: Holding, node: Node, tokens: int) -> None:
        """Take over the first tokens of a page that another sequence goes on with differently."""
        source = self._held_page(node)
        self._touch(node)
        try:
            if self.grow(holding, holding.table.length + tokens):
                holding.table.pages[-1].copy(source, tokens)
                holding.table.length += tokens
        finally:
            self._drop(source)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Make room for `tokens` positions; False where memory does not suffice: then as far as it does."""
        while holding.table.capacity < tokens:
            if self.pages >= self.limit and not self._evict():
                return False
            holding.table.pages.append(self.shape.page())
            self.pages += 1
        return True

    def publish(self, holding: Holding, tokens: Sequence[int], *, part: bool = False) -> Node:
        """Put full committed pages into the tree, and the last one too where `part` says so; `tokens` are those of
        the whole sequence. Returns the node of the last page that holds nothing else."""
        table = holding.table
        while table.length >= (holding.depth + 1) * PAGE:
            start = holding.depth * PAGE
            holding.node = self._put(holding, key_of(tokens[start : start + PAGE]))
            holding.depth += 1
        start = holding.depth * PAGE
        if part and table.length > start:
            key = key_of(tokens[start : table.length])
            if not any(other.startswith(key) for other in holding.node.children):
                return self._put(holding, key)
            return holding.node.children.get(key, holding.node)
        return holding.node

    def release(self, holding: Holding, tokens: Sequence[int], owner: Owner) -> None:
        """A sequence left: what is committed stays in the tree for whoever comes next."""
        self._mark(self.publish(holding, tokens, part=True), owner)
        self._touch(holding.node)
        self.running.remove(holding)
        for page in holding.table.pages:
            self._drop(page)
        holding.table.pages.clear()
        used = {id(other.node) for other in self.running}
        self.roots = {key: root for key, root in self.roots.items() if root.children or id(root) in used}

    def forget(self, owner: Owner) -> bool:
        """Drop the pages of a trajectory that are not on the way to those of another one, or of a running sequence;
        whether it had any."""
        nodes = self.tips.pop(owner, set())
        for node in nodes:
            node.tips.discard(owner)
        for node in nodes:
            at = node
            while at in self._recent and not at.children and not at.tips and at.page is not None and at.page.refs == 1:
                above = at.parent
                self._remove(at)
                assert above is not None
                at = above
        return bool(nodes)

    def bytes_of(self, owner: Owner) -> int:
        """Memory of the pages of a trajectory, those included that it shares with others."""
        pages = set[int]()
        for tip in self.tips.get(owner, ()):
            at: Node | None = tip
            while at is not None and at.page is not None:
                pages.add(id(at))
                at = at.parent
        return len(pages) * self.shape.page_bytes

    def _mark(self, node: Node, owner: Owner) -> None:
        """A turn of a trajectory ends at a node: earlier ends on the way there are none any more."""
        known = self.tips.get(owner, set())
        at: Node | None = node if node.page is not None else None
        if at is None or node in known or len(node.tips) >= MAX_TIPS:
            return
        while at is not None and known:
            if at in known:
                known.discard(at)
                at.tips.discard(owner)
            at = at.parent
        self.tips.setdefault(owner, set()).add(node)
        node.tips.add(owner)

    def _root(self, scope: Scope) -> Node:
        key = None if self.sharing == PrefixSharing.ALL else scope
        return self.roots.setdefault(key, Node(b"", None, None))

    def _match(self, root: Node, key: bytes) -> tuple[list[Node], tuple[Node, int] | None]:
        """The nodes whose full pages a sequence begins with, and the node that goes on longest like it, and how far."""
        nodes: list[Node] = []
        node, size = root, PAGE * WIDTH
        while len(key) - len(nodes) * size >= size:
            child = node.children.get(key[len(nodes) * size : (len(nodes) + 1) * size])
            if child is None:
                break
            nodes.append(child)
            node = child
        rest = key[len(nodes) * size : (len(nodes) + 1) * size]
        similar = [(common_tokens(other, rest), child) for other, child in node.children.items()]
        best = max(similar, key=lambda pair: pair[0], default=(0, node))
        return nodes, (best[1], best[0]) if best[0] else None

    def _put(self, holding: Holding, key: bytes) -> Node:
        """The child of the sequence's node for its next page. Where there was one already, its page takes the place of
        the sequence's own; parts that the new one covers leave."""
        parent, at = holding.node, holding.depth
        child = parent.children.get(key)
        page = holding.table.pages[at]
        if child is not None:
            if child.page is not page and len(key) == PAGE * WIDTH:
                holding.table.pages[at] = self._held_page(child)
                self._drop(page)
            return child
        for other in [other for other in parent.children if key.startswith(other)]:
            self._remove(parent.children[other])
        page.refs += 1
        child = parent.children[key] = Node(key, page, parent)
        self._touch(child)
        return child

    def _held_page(self, node: Node) -> Page:
        assert node.page is not None
        node.page.refs += 1
        return node.page

    def _drop(self, page: Page) -> None:
        page.refs -= 1
        if page.refs == 0:
            self.pages -= 1

    def _remove(self, node: Node) -> None:
        assert node.parent is not None and node.page is not None
        del node.parent.children[node.key]
        del self._recent[node]
        self._drop(node.page)
        for owner in node.tips:
            self.tips[owner].discard(node)
            self._mark(node.parent, owner)
            if not self.tips[owner]:
                del self.tips[owner]

    def _touch(self, node: Node) -> None:
        """A node and those above it were used."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            self._recent.pop(at, None)
            self._recent[at] = None
            at = at.parent

    def _evict(self) -> bool:
        """Drop the least recently used page that nobody runs on and no other page follows; False where there is
        none."""
        for node in self._recent:
            if not node.children and node.page is not None and node.page.refs == 1:
                self._remove(node)
                self.evicted += 1
                return True
        return False
