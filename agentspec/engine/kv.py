"""Keys and values of sequences: one slab per sequence, kept after a turn for the next one, under a byte limit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.kernels.cpu.lanes import LANES
from agentspec.types import Scope, Trajectory

BLOCK = LANES
"""Positions whose keys lie together, (dim, BLOCK): the layout that the kernels of the CPU read."""

GROWTH = 256
"""Tokens by which a slab grows at least."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Per-token extent of the cache, float32."""

    layers: int
    heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.heads * self.dim * 4


class Slab:
    """Keys and values of one sequence; the first `length` positions are committed.

    `k` is (layers, kv heads, blocks, dim, BLOCK), `v` is (layers, kv heads, blocks, BLOCK, dim).
    """

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.length = 0
        self.k, self.v = self._room(0)

    @property
    def capacity(self) -> int:
        return self.k.shape[2] * BLOCK

    @torch.inference_mode()
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` positions; committed ones are kept."""
        if tokens > self.capacity:
            self._move(max(tokens + GROWTH, self.capacity * 5 // 4))

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows `length + path[i]` of the last pass as the next committed positions, in order."""
        moved = [(at, row) for at, row in enumerate(path) if at != row]
        if moved:
            to, source = (torch.tensor(column) + self.length for column in zip(*moved, strict=True))
            self.k[:, :, to // BLOCK, :, to % BLOCK] = self.k[:, :, source // BLOCK, :, source % BLOCK]
            self.v[:, :, to // BLOCK, to % BLOCK] = self.v[:, :, source // BLOCK, source % BLOCK]
        self.length += len(path)

    @torch.inference_mode()
    def trim(self) -> None:
        """Give back the room beyond the committed positions."""
        self._move(self.length)

    @torch.inference_mode()
    def copy_prefix(self, source: "Slab", tokens: int) -> None:
        """Take over the first `tokens` positions of another slab by copying."""
        self.reserve(tokens)
        self._copy(source, tokens)
        self.length = tokens

    def _room(self, tokens: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        blocks = -(-tokens // BLOCK)
        keys = torch.empty(shape.layers, shape.heads, blocks, shape.dim, BLOCK)
        return keys, torch.empty(shape.layers, shape.heads, blocks, BLOCK, shape.dim)

    def _move(self, tokens: int) -> None:
        """Into a room for `tokens` positions."""
        old = Slab(self.shape)
        old.k, old.v = self.k, self.v
        self.k, self.v = self._room(tokens)
        self._copy(old, self.length)

    def _copy(self, source: "Slab", tokens: int) -> None:
        blocks = -(-tokens // BLOCK)
        for mine, theirs in ((self.k, source.k), (self.v, source.v)):
            mine[:, :, :blocks] = theirs[:, :, :blocks]


@dataclass(eq=False, slots=True)
class Holding:
    """A slab and the tokens its committed positions belong to."""

    slab: Slab
    trajectory: Trajectory
    tokens: NDArray[np.int32]
    """At least the committed tokens; `slab.length` says how many of them count."""

    reserved: int
    """Tokens this holding may grow to while it runs; its capacity once it is finished."""


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Number of leading tokens that two sequences share."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def fits(slab: Slab, reserve: int) -> bool:
    """Whether a slab takes about the memory that a sequence of up to `reserve` tokens is accounted for."""
    return slab.capacity <= (reserve + GROWTH) * 5 // 4


class KVPool:
    """All slabs of a worker: running ones and, least recently used first, those of finished turns.

    Prefixes are reused inside one scope only. Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, shape: KVShape, limit_bytes: int) -> None:
        self.shape = shape
        self.limit = limit_bytes // shape.token_bytes // BLOCK * BLOCK
        """Most tokens held at once: whole blocks."""

        self.running: list[Holding] = []
        self.finished: list[Holding] = []

    @property
    def used(self) -> int:
        """Tokens that running sequences may grow to, and finished ones hold."""
        return sum(holding.reserved for holding in self.running + self.finished)

    def admits(self, tokens: int) -> bool:
        """Whether a sequence of up to `tokens` fits beside the running ones."""
        return sum(holding.reserved for holding in self.running) + tokens <= self.limit

    def acquire(self, trajectory: Trajectory, prompt: NDArray[np.int32], reserve: int) -> Holding:
        """A slab for `prompt`, with the longest known prefix of all but its last token already committed.

        Precondition: `admits(reserve)`. Evicts finished turns until the reservation fits.
        """
        source, shared = self._longest_prefix(trajectory.scope, prompt[:-1])
        slab = Slab(self.shape)
        if source is not None and self._is_outgrown(source, trajectory, shared) and fits(source.slab, reserve):
            self.finished.remove(source)
            slab = source.slab
            slab.length = shared
        elif source is not None:
            slab.copy_prefix(source.slab, shared)
        holding = Holding(slab, trajectory, prompt, reserve)
        self.running.append(holding)
        self._evict()
        return holding

    def release(self, holding: Holding, committed: Sequence[int]) -> None:
        """A sequence ended: keep its slab for the next turn. `committed` are the tokens of the whole sequence."""
        self.running.remove(holding)
        length = holding.slab.length
        holding.tokens = np.asarray(committed[:length], dtype=np.int32)
        holding.reserved = holding.slab.capacity
        self.finished.append(holding)
        self._evict(spare=1)
        if self.used > self.limit:
            holding.slab.trim()
            holding.reserved = holding.slab.capacity

    def _evict(self, spare: int = 0) -> None:
        """Drop finished turns, least recently used first, until the limit is kept or `spare` are left."""
        while len(self.finished) > spare and self.used > self.limit:
            self.finished.pop(0)

    def _is_outgrown(self, source: Holding, trajectory: Trajectory, shared: int) -> bool:
        """Whether nobody but `trajectory` has use for a finished turn's slab."""
        return source in self.finished and (source.trajectory == trajectory or shared == source.slab.length)

    def _longest_prefix(self, scope: Scope, tokens: NDArray[np.int32]) -> tuple[Holding | None, int]:
        best: Holding | None = None
        longest = 0
        for holding in self.finished + self.running:
            if holding.trajectory.scope == scope:
                shared = min(common_prefix(holding.tokens, tokens), holding.slab.length)
                if shared > longest:
                    best, longest = holding, shared
        return best, longest
