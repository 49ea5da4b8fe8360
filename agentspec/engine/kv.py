"""Keys and values in pages: what sequences hold of them, and how they grow. `prefix` says who shares them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from agentspec.kernels.cpu.attend import PAGE
from agentspec.kernels.cpu.lanes import LANES

BLOCK = LANES
"""Positions whose keys lie together, (dim, BLOCK): the layout that the kernels of the CPU read."""


class PageSource(Protocol):
    """Makes the pages of a worker, and says how large they are."""

    @property
    def layers(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def dim(self) -> int: ...

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        ...

    def page(self) -> "Page":
        """A page that nobody holds yet; its memory is free again when nobody refers to it any more."""
        ...


@dataclass(frozen=True, slots=True)
class KVShape:
    """Per-token extent of the cache on the CPU, float32."""

    layers: int
    heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.heads * self.dim * 4

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.token_bytes * PAGE

    def page(self) -> "Page":
        """A page of its own memory."""
        return Page(self)


class Page:
    """Keys and values of `PAGE` neighbouring positions, over all layers, in one piece of memory.

    `k` is (layers, kv heads, PAGE / BLOCK, dim, BLOCK), `v` is (layers, kv heads, PAGE, dim).
    """

    __slots__ = ("address", "k", "refs", "v")

    def __init__(self, shape: KVShape) -> None:
        memory = torch.empty(2, shape.layers, shape.heads, PAGE * shape.dim)
        self.k = memory[0].view(shape.layers, shape.heads, PAGE // BLOCK, shape.dim, BLOCK)
        self.v = memory[1].view(shape.layers, shape.heads, PAGE, shape.dim)
        self.address = memory.data_ptr()
        self.refs = 1
        """Sequences and entries of the prefix tree that hold the page."""

    def keys(self, layer: int) -> Tensor:
        """A layer's keys, (kv heads, PAGE, dim)."""
        return self.k[layer].transpose(2, 3).flatten(1, 2)

    def write(self, layer: int, to: Tensor, k: Tensor, v: Tensor) -> None:
        """Put rows of a layer, each (kv heads, rows, dim), into positions `to`."""
        self.k[layer][:, to // BLOCK, :, to % BLOCK] = k.transpose(0, 1)
        self.v[layer][:, to] = v

    def move(self, source: "Page", to: Tensor, origin: Tensor) -> None:
        """Copy positions `origin` of another page, or of this one, to positions `to`."""
        self.k[:, :, to // BLOCK, :, to % BLOCK] = source.k[:, :, origin // BLOCK, :, origin % BLOCK]
        self.v[:, :, to] = source.v[:, :, origin]

    @torch.inference_mode()
    def copy(self, source: "Page", tokens: int) -> None:
        """Copy the first `tokens` positions of another page."""
        blocks = pages_of(tokens, BLOCK)
        self.k[:, :, :blocks] = source.k[:, :, :blocks]
        self.v[:, :, :tokens] = source.v[:, :, :tokens]


def pages_of(tokens: int, size: int = PAGE) -> int:
    """Pages, or pieces of another size, that hold so many tokens."""
    return -(-tokens // size)


class PageTable:
    """The pages of one sequence; the first `length` positions are committed."""

    def __init__(self, shape: PageSource) -> None:
        self.shape = shape
        self.length = 0
        self.pages: list[Page] = []

    @property
    def capacity(self) -> int:
        """Positions that there is room for."""
        return len(self.pages) * PAGE

    @torch.inference_mode()
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` positions, under no limit: the engine's sequences grow by `KVPool.grow` before."""
        while self.capacity < tokens:
            self.pages.append(self.shape.page())

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows `length + path[i]` of the last pass, `path` ascending, as the next committed positions."""
        moves = [(self.length + at, self.length + row) for at, row in enumerate(path) if at != row]
        for (to, source), some in groupby(moves, lambda move: (move[0] // PAGE, move[1] // PAGE)):
            here, origin = (torch.tensor(column) % PAGE for column in zip(*some, strict=True))
            self.pages[to].move(self.pages[source], here, origin)
        self.length += len(path)

    def keys_and_values(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` positions of a layer, each (kv heads, tokens, dim); copies."""
        pages = self.pages[: pages_of(tokens)]
        keys = torch.cat([page.keys(layer) for page in pages], 1)
        return keys[:, :tokens], torch.cat([page.v[layer] for page in pages], 1)[:, :tokens]

    @torch.inference_mode()
    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put a layer's rows, (kv heads, rows, dim), behind the committed positions; room must be reserved."""
        rows = k.shape[1]
        place = torch.arange(self.length, self.length + rows)
        for number in range(self.length // PAGE, pages_of(self.length + rows)):
            here = (place // PAGE == number).nonzero().flatten()
            self.pages[number].write(layer, place[here] % PAGE, k[:, here], v[:, here])
