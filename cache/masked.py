"""`MaskedIndex`: where a text has said nearly the same before, and how it went on.

A context is the last few tokens before a position. For every choice of places that may differ, a *mask*, positions
whose contexts agree everywhere else form a chain, latest first. `table` is an open-addressing hash of these chains: an
entry is position * masks + mask of the latest one, and `before` (int32[positions, masks]) leads to the one before it.
Contexts are compared in the text itself, so that no two are ever taken for one.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.automaton import Int32s, Int64s
from agentspec.compiled import compiled

Masks = NDArray[np.bool_]

TOKENS, INDEXED, CHAINS = 0, 1, 2
"""Entries of `sizes`: tokens of the text; the position that is indexed next; chains in the table."""


@dataclass(frozen=True, slots=True)
class Matching:
    """What counts as nearly the same, and how much of what followed is copied."""

    context: int = 4
    """Tokens compared."""

    substitutions: int = 1
    """How many of them may differ: 0, 1 or 2."""

    depth: int = 4
    """Tokens of a continuation; a position counts once all of them have been said."""

    @property
    def masks(self) -> Masks:
        """Rows of which tokens of a context must agree: one for each choice of those that need not."""
        free = list(combinations(range(self.context), self.substitutions))
        masks = np.ones((len(free), self.context), np.bool_)
        for mask, places in zip(masks, free, strict=True):
            mask[list(places)] = False
        return masks


@compiled
def hashed(masks: Masks, mask: int, text: Int32s, end: int) -> int:
    """The context that ends before `end`, as far as a mask sees it, as a number."""
    context = masks.shape[1]
    key = np.uint64(mask + 1) * np.uint64(0x9E3779B97F4A7C15)
    for place in range(context):
        if masks[mask, place]:
            key = (key ^ np.uint64(text[end - context + place])) * np.uint64(0xC2B2AE3D27D4EB4F)
            key ^= key >> np.uint64(29)
    return int(np.int64(key >> np.uint64(1)))


@compiled
def agree(masks: Masks, mask: int, tokens: Int32s, position: int, text: Int32s, end: int) -> bool:
    """Whether a mask sees the same before `position` of the tokens as before `end` of a text."""
    context = masks.shape[1]
    for place in range(context):
        if masks[mask, place] and tokens[position - context + place] != text[end - context + place]:
            return False
    return True


@compiled
def slot(tokens: Int32s, table: Int32s, masks: Masks, mask: int, text: Int32s, end: int) -> int:
    """Where the chain of a masked context is in the table, or would be."""
    count, most = masks.shape[0], table.shape[0] - 1
    at = hashed(masks, mask, text, end) & most
    while table[at] >= 0:
        position = table[at] // count
        if table[at] - position * count == mask and agree(masks, mask, tokens, position, text, end):
            break
        at = (at + 1) & most
    return int(at)


@compiled
def with_room(tokens: Int32s, table: Int32s, masks: Masks, chains: int) -> Int32s:
    """The table, or a larger one, in which so many chains take half of the places at most."""
    if 2 * chains <= table.shape[0]:
        return table
    size = table.shape[0]
    while size < 2 * chains:
        size *= 2
    larger = np.full(size, -1, np.int32)
    for entry in table:
        if entry >= 0:
            position = entry // masks.shape[0]
            larger[slot(tokens, larger, masks, entry - position * masks.shape[0], tokens, position)] = entry
    return larger


@compiled
def index_up_to(tokens: Int32s, before: Int32s, table: Int32s, masks: Masks, sizes: Int64s, last: int) -> Int32s:
    """Put the positions up to `last` that are not indexed yet into their chains; the table."""
    count = masks.shape[0]
    for position in range(sizes[INDEXED], last + 1):
        table = with_room(tokens, table, masks, sizes[CHAINS] + count)
        for mask in range(count):
            at = slot(tokens, table, masks, mask, tokens, position)
            sizes[CHAINS] += table[at] < 0
            before[position, mask] = table[at] // count if table[at] >= 0 else -1
            table[at] = position * count + mask
        sizes[INDEXED] = position + 1
    return table


@compiled
def latest(tokens: Int32s, before: Int32s, table: Int32s, masks: Masks, text: Int32s, width: int) -> Int32s:
    """At most `width` positions whose context is nearly the end of a text, latest first."""
    count = masks.shape[0]
    found, taken = np.empty(width, np.int32), 0
    heads = np.empty(count, np.int32)
    for mask in range(count):
        entry = table[slot(tokens, table, masks, mask, text, text.shape[0])]
        heads[mask] = entry // count if entry >= 0 else -1
    while taken < width:
        position = heads.max()
        if position < 0:
            break
        found[taken] = position
        taken += 1
        for mask in range(count):
            if heads[mask] == position:
                heads[mask] = before[position, mask]
    return found[:taken]


class MaskedIndex:
    """One text that is appended to. Not safe for concurrent use."""

    def __init__(self, matching: Matching = Matching()) -> None:
        self.matching = matching
        self.masks = matching.masks
        self.text = np.zeros(64, np.int32)
        self.before = np.zeros((64, len(self.masks)), np.int32)
        self.table = np.full(64, -1, np.int32)
        self.sizes = np.array([0, matching.context, 0], np.int64)

    def __len__(self) -> int:
        return int(self.sizes[TOKENS])

    @property
    def bytes(self) -> int:
        """Memory of the arrays."""
        return self.text.nbytes + self.before.nbytes + self.table.nbytes

    @property
    def tokens(self) -> Int32s:
        """The text so far, until it is appended to."""
        return self.text[: len(self)]

    def extend(self, tokens: Int32s) -> None:
        """Append tokens, and index the positions whose continuations are complete now."""
        size = len(self)
        if size + tokens.size > self.text.size:
            room = (size + tokens.size) * 3 // 2 + 64
            self.text, text = np.zeros(room, np.int32), self.text
            self.before, before = np.zeros((room, len(self.masks)), np.int32), self.before
            self.text[:size], self.before[:size] = text[:size], before[:size]
        self.text[size : size + tokens.size] = tokens
        self.sizes[TOKENS] += tokens.size
        last = len(self) - self.matching.depth
        self.table = index_up_to(self.text, self.before, self.table, self.masks, self.sizes, last)

    def positions(self, width: int, text: Int32s | None = None) -> list[int]:
        """At most `width` positions whose context is nearly the end of a text, this one unless told, latest first."""
        asked = self.tokens if text is None else text
        if asked.size < self.matching.context or width <= 0:
            return []
        end = asked[asked.size - self.matching.context :]
        found: list[int] = latest(self.text, self.before, self.table, self.masks, end, width).tolist()
        return found

    def continuations(self, width: int, text: Int32s | None = None) -> list[tuple[int, ...]]:
        """What followed those positions; two of them may have gone on alike."""
        depth = self.matching.depth
        return [tuple(self.text[at : at + depth].tolist()) for at in self.positions(width, text)]

    def keep(self, tokens: int) -> None:
        """Forget all but the last tokens."""
        kept = MaskedIndex(self.matching)
        kept.extend(self.tokens[max(len(self) - tokens, 0) :].copy())
        self.text, self.before, self.table, self.sizes = kept.text, kept.before, kept.table, kept.sizes
