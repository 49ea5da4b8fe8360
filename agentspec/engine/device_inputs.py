"""What a pass on a device reads: tensors of fixed size and place, filled on the host and sent in one copy."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from agentspec.engine.attention import Segment
from agentspec.errors import KernelError
from agentspec.kernels.cpu.attend import PAGE
from agentspec.kernels.triton.batch import MOST_NODES, WORD, TreeBatch, ancestor_words
from agentspec.kernels.triton.tree_attention import power_of_two

LEAST_POSITIONS = 1024
"""Passes over shorter sequences share their buffers."""

ALIGNED = 32
"""Every tensor begins at a multiple of so many numbers."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What there is room for in the inputs of a pass."""

    sequences: int
    rows: int
    most_rows: int
    """Of one sequence."""

    most_nodes: int
    """Of one tree; a chunk of a prompt is none."""

    positions: int
    """Of one sequence, its rows included."""

    @property
    def pages(self) -> int:
        """Entries of a sequence's block table."""
        return -(-self.positions // PAGE)

    @property
    def words(self) -> int:
        """Words of a row of ancestors."""
        return -(-self.most_nodes // WORD)


def is_tree(segment: Segment) -> bool:
    """Whether the kernels take a segment's rows for a tree: a single row is one, other chains are chunks."""
    return segment.parents is not None or len(segment.tokens) == 1


def exact_extent(segments: Sequence[Segment]) -> Extent:
    """Room for these segments and no more."""
    sizes = [len(segment.tokens) for segment in segments]
    trees = [size for segment, size in zip(segments, sizes, strict=True) if is_tree(segment)]
    positions = [segment.table.length + size for segment, size in zip(segments, sizes, strict=True)]
    return Extent(len(segments), sum(sizes), max(sizes), max(trees, default=1), max(positions))


def rounded_extent(exact: Extent) -> Extent:
    """Room for trees alone, in sizes that many passes share: powers of two."""
    rows = power_of_two(exact.rows)
    nodes = min(rows, MOST_NODES)
    positions = power_of_two(max(exact.positions, LEAST_POSITIONS))
    return Extent(power_of_two(exact.sequences), rows, nodes, nodes, positions)


class Inputs:
    """Room for a pass of some extent, on the host and on the device."""

    def __init__(self, extent: Extent, keep: Sequence[int], device: torch.device) -> None:
        """`keep`: the rows whose logits are wanted, ascending; rows that pad the batch may be among them."""
        self.extent = extent
        self.keep = keep
        shapes = shapes_of(extent)
        ends = list(accumulate(-(-prod(shape) // ALIGNED) * ALIGNED for shape in shapes.values()))
        self._staging = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._buffer = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        places = dict(zip(shapes, [0, *ends], strict=False))
        self._host: dict[str, NDArray[np.int32]] = {
            name: self._staging[at : at + prod(shapes[name])].view(shapes[name]).numpy() for name, at in places.items()
        }
        there = {name: self._buffer[at : at + prod(shapes[name])].view(shapes[name]) for name, at in places.items()}
        self.token = there.pop("token")
        self.position = there.pop("position")
        self.walked = there.pop("walked")
        """(sequences): 1 where the device makes the walk, 0 where the host does."""

        scored = torch.tensor(keep, dtype=torch.int64, device=device)
        self.batch = TreeBatch(**there, scored=scored, most_rows=extent.most_rows, most_positions=extent.positions)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fill(self, segments: Sequence[Segment], walked: Sequence[bool], vocabulary: int) -> None:
        """Describe segments, for which there must be room, and send that to the device.

        Raises `KernelError` for a token that is not in the vocabulary, as a GPU that looks one up stops for good.
        """
        if self._sent is not None:
            self._sent.synchronize()
        self._staging.zero_()
        host = self._host
        host["owner"][:] = -1
        starts = [0, *accumulate(len(segment.tokens) for segment in segments)]
        host["start"][:] = starts[-1]
        host["start"][: len(starts)] = starts
        for number, segment in enumerate(segments):
            self._describe(number, segment, slice(starts[number], starts[number + 1]))
            first = bisect_left(self.keep, starts[number])
            host["first_scored"][number] = max(min(first, len(self.keep) - 1), 0)
        host["walked"][: len(walked)] = walked
        least, most = host["token"].min(), host["token"].max()
        if least < 0 or most >= vocabulary:
            raise KernelError(f"tokens are below {vocabulary}, got {least} to {most}")
        self.send()

    def _describe(self, number: int, segment: Segment, rows: slice) -> None:
        host, length = self._host, segment.table.length
        size = rows.stop - rows.start
        pages = [page.address for page in segment.table.pages[: -(-(length + size) // PAGE)]]
        host["length"][number] = length
        host["table"][number, : len(pages)] = pages
        host["chunk"][number] = not is_tree(segment)
        host["owner"][rows] = number
        parents = range(-1, size - 1) if segment.parents is None else segment.parents
        host["parent"][rows] = parents
        host["depth"][rows] = segment.depths
        host["token"][rows] = segment.tokens
        host["position"][rows] = length + host["depth"][rows]
        if is_tree(segment):
            host["ancestors"][rows] = ancestor_words(parents, self.extent.words)

    def first_scored(self, sequences: int) -> list[int]:
        """Where the kept rows of the first sequences begin among all kept rows."""
        return [int(first) for first in self._host["first_scored"][:sequences]]

    def send(self) -> None:
        """Copy what the host has filled in to the device; nothing waits for it."""
        self._buffer.copy_(self._staging, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def shapes_of(extent: Extent) -> dict[str, tuple[int, ...]]:
    """The tensors of the inputs, all int32."""
    sequences, rows = extent.sequences, extent.rows
    return {
        "start": (sequences + 1,),
        "length": (sequences,),
        "table": (sequences, extent.pages),
        "chunk": (sequences,),
        "owner": (rows,),
        "parent": (rows,),
        "depth": (rows,),
        "ancestors": (rows, extent.words),
        "first_scored": (sequences,),
        "token": (rows,),
        "position": (rows,),
        "walked": (sequences,),
    }
