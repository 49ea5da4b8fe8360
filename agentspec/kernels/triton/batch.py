"""What the kernels work on: keys and values in pages, and a ragged batch of token trees and prompt chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.errors import KernelError

MOST_NODES = 256
"""Nodes of a tree, its root included."""

WORD = 32
"""Nodes that one word of a row of ancestors stands for."""

DIMS = (64, 96, 128, 256)
"""Sizes of a head that the attention knows."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """Keys and values of all sequences in pages that block tables name.

    Both are (layers, pages, page, kv heads, dim), with the features of a head side by side in memory. What lies in
    slots that no sequence has written may be anything, NaN included.
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.keys.shape)
        if len(shape) != 5 or self.values.shape != self.keys.shape or self.values.dtype != self.keys.dtype:
            raise KernelError(f"keys {shape} and values {tuple(self.values.shape)} are no pages of one kind")
        if self.page < 1 or self.page & (self.page - 1):
            raise KernelError(f"the slots of a page must be a power of two, got {self.page}")
        if self.keys.dtype not in DTYPES:
            raise KernelError(f"keys and values must be float32, float16 or bfloat16, got {self.keys.dtype}")
        if self.keys.stride(-1) != 1 or self.keys.stride() != self.values.stride():
            raise KernelError("keys and values must have the same strides, 1 along a head")

    @property
    def page(self) -> int:
        """Positions of a page."""
        return self.keys.shape[2]

    @property
    def heads(self) -> int:
        """Heads that have keys and values."""
        return self.keys.shape[3]

    @property
    def dim(self) -> int:
        """Features of a head."""
        return self.keys.shape[4]


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """The rows of one pass, sequence after sequence: a tree below its last committed token, or a chunk of its prompt.

    Row i of a sequence has its keys in slot `length + i`; a tree's root is its row 0. All tensors lie on one device,
    are contiguous and, but for `scored`, int32. A sequence without rows is allowed: batches are padded with them.
    """

    start: Tensor
    """(sequences + 1): the first row of each sequence, and the end of the last."""

    length: Tensor
    """(sequences): positions in the cache before this pass."""

    table: Tensor
    """(sequences, most pages): the page of each run of positions; entries beyond a sequence's need may be anything."""

    chunk: Tensor
    """(sequences): 1 for a prompt's chunk, whose rows see all before them; 0 for a tree."""

    owner: Tensor
    """(rows): each row's sequence; -1 for rows that pad the batch."""

    parent: Tensor
    """(rows): the row above, counted from the sequence's first; -1 for a root."""

    depth: Tensor
    """(rows): distance from the root; the row's position is `length + depth`."""

    ancestors: Tensor
    """(rows, words): bit b of word w is set if node 32 w + b is the row itself or above it; 0 in chunks."""

    scored: Tensor
    """(choices) int64: the rows whose logits are needed: all nodes of a tree, the last row of a chunk."""

    first_scored: Tensor
    """(sequences): where a sequence's rows begin in `scored`."""

    most_rows: int
    """No sequence has more rows."""

    most_positions: int
    """No sequence has more positions, its rows included."""

    @property
    def sequences(self) -> int:
        return self.length.shape[0]

    @property
    def rows(self) -> int:
        return self.owner.shape[0]


def ancestor_words(parent: Sequence[int], words: int) -> NDArray[np.int32]:
    """(nodes, words) int32: for each node, the bits of itself and of the nodes above it."""
    lines: list[int] = []
    for node, above in enumerate(parent):
        lines.append((lines[above] if node else 0) | 1 << node)
    packed = b"".join(line.to_bytes(words * 4, "little") for line in lines)
    return np.frombuffer(packed, np.dtype("<i4")).reshape(len(parent), words)


def depths_of(parent: Sequence[int]) -> list[int]:
    """Distance of each node from the root. Raises `KernelError` where a node is not below an earlier one."""
    depths: list[int] = []
    for node, above in enumerate(parent):
        if not (above == -1 if node == 0 else 0 <= above < node):
            raise KernelError(f"node {node} of a tree hangs below {above}")
        depths.append(depths[above] + 1 if node else 0)
    return depths


def tree_batch(
    segments: Sequence[Sequence[int] | int],
    lengths: Sequence[int],
    table: Tensor,
    device: torch.device | str = "cpu",
) -> TreeBatch:
    """A batch of trees, given by their nodes' parents, and of chunks, given by their number of rows.

    lengths: positions of each sequence in the cache; table: (sequences, pages) of page numbers. Raises `KernelError`
    for a tree that is none or too large, and where the three disagree about the number of sequences.
    """
    if not len(segments) == len(lengths) == table.shape[0]:
        raise KernelError(
            f"{len(segments)} segments, {len(lengths)} lengths and {table.shape[0]} rows of a block table"
        )
    parents = [range(-1, part - 1) if isinstance(part, int) else part for part in segments]
    chunks = [isinstance(part, int) for part in segments]
    sizes = [len(part) for part in parents]
    largest = max((size for size, chunk in zip(sizes, chunks, strict=True) if not chunk), default=1)
    if largest > MOST_NODES:
        raise KernelError(f"a tree may have {MOST_NODES} nodes, got {largest}")
    depths = [depths_of(part) for part in parents]
    words = -(-max(largest, 1) // WORD)
    bits = [
        np.zeros((size, words), np.int32) if chunk else ancestor_words(part, words)
        for part, size, chunk in zip(parents, sizes, chunks, strict=True)
    ]
    start = [0, *accumulate(sizes)]
    scored = [
        range(end - min(size, 1), end) if chunk else range(end - size, end)
        for end, size, chunk in zip(start[1:], sizes, chunks, strict=True)
    ]

    def whole(values: Sequence[int], kind: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    return TreeBatch(
        start=whole(start),
        length=whole(list(lengths)),
        table=table.to(device, torch.int32).contiguous(),
        chunk=whole(chunks),
        owner=whole([sequence for sequence, size in enumerate(sizes) for _ in range(size)]),
        parent=whole([above for part in parents for above in part]),
        depth=whole([depth for part in depths for depth in part]),
        ancestors=torch.from_numpy(np.concatenate([np.zeros((0, words), np.int32), *bits])).to(device),
        scored=whole([row for part in scored for row in part], torch.int64),
        first_scored=whole([0, *accumulate(len(part) for part in scored)][:-1]),
        most_rows=max(sizes, default=0),
        most_positions=max((size + length for size, length in zip(sizes, lengths, strict=True)), default=0),
    )


def slots_of(batch: TreeBatch, page: int, positions: Tensor, sequence: Tensor) -> Tensor:
    """int64: where positions of sequences lie, counted in slots over all pages."""
    pages = batch.table[sequence.long(), positions.long() // page]
    return pages.long() * page + positions.long() % page
