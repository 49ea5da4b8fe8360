"""Shapes that the kernels of the GPU worker are checked with, and tensors for them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels.triton.batch import PagedCache, TreeBatch, tree_batch

LAYERS = 2

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest difference between a kernel and its twin, for values around 1."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch to attend for: trees by their nodes' parents, chunks by their rows."""

    name: str
    segments: tuple[tuple[int, ...] | int, ...]
    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32


def chain(nodes: int) -> tuple[int, ...]:
    """Parents of a tree that is a line."""
    return tuple(range(-1, nodes - 1))


def star(nodes: int) -> tuple[int, ...]:
    """Parents of a root with leaves."""
    return (-1, *[0] * (nodes - 1))


def random_tree(nodes: int, seed: int = 0) -> tuple[int, ...]:
    """Parents of a tree that is deep in places and wide in others."""
    dice = random.Random(seed)
    return (-1, *(dice.randint(max(0, node - 5), node - 1) for node in range(1, nodes)))


EDGES = tuple(
    Case(f"length {length}", (random_tree(5),), (length,)) for length in (0, 1, 15, 16, 17, 31, 32, 33, 47, 48)
)
SHAPES = tuple(
    Case(f"{name} of {size}", (make(size),), (21,))
    for name, make, size in (
        ("one node", chain, 1),
        ("chain", chain, 31),
        ("chain", chain, 32),
        ("star", star, 33),
        ("random", random_tree, 64),
        ("random", random_tree, 65),
        ("random", random_tree, 256),
    )
)
HEADS = tuple(
    Case(f"{group} heads on one, dim {dim}", (random_tree(7), chain(3)), (18, 5), 2 * group, 2, dim)
    for group, dim in ((1, 64), (2, 96), (3, 64), (4, 128), (5, 64), (6, 64), (7, 64), (8, 256))
)
KINDS = tuple(
    Case(f"{str(dtype).removeprefix('torch.')}, dim {dim}", (random_tree(9), 4), (20, 33), 4, 2, dim, dtype=dtype)
    for dtype, dim in ((torch.float16, 64), (torch.float16, 96), (torch.bfloat16, 128), (torch.bfloat16, 64))
)
MANNERS = (
    Case("window 1", (random_tree(9), 3), (20, 0), window=1),
    Case("window inside the tree", (chain(20), 20), (40, 40), window=7),
    Case("window behind the tree", (random_tree(9), random_tree(9)), (50, 3), window=24),
    Case("window of all", (random_tree(9),), (20,), window=1000),
    Case("soft cap", (random_tree(9), 4), (20, 0), softcap=5.0),
    Case("window and soft cap", (random_tree(20, 2), 9), (40, 30), 8, 2, window=12, softcap=20.0, dtype=torch.float16),
)
MIXED = (
    Case("mixed lengths", (random_tree(40, 3), 1, chain(1), star(6), 50, chain(9)), (70, 0, 0, 33, 16, 64), page=8),
    Case("sequences without rows", (chain(3), 0, random_tree(4), 0), (5, 0, 17, 9)),
    Case("pages of one slot", (random_tree(5), 3), (5, 2), page=1),
    Case("a chunk from nothing", (70,), (0,)),
    Case("nothing", (), ()),
    Case("rows of nobody", (0, 0), (3, 0)),
)
CASES = (*EDGES, *SHAPES, *HEADS, *KINDS, *MANNERS, *MIXED)
LONG = Case("context of 32768", (random_tree(16), 9), (32768, 32000), page=64)


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """Tensors for a case. Slots that no sequence has written hold NaN."""

    cache: PagedCache
    batch: TreeBatch
    q: Tensor
    k: Tensor
    v: Tensor


def fill(case: Case, device: str, seed: int = 0, spare: int = 2) -> Filled:
    """Random contexts in shuffled pages, and queries, keys and values of the rows; `spare` pages are nobody's."""
    dice = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    rows = [part if isinstance(part, int) else len(part) for part in case.segments]
    needs = [-(-(length + size) // case.page) for length, size in zip(case.lengths, rows, strict=True)]
    free = list(range(sum(needs) + spare))
    dice.shuffle(free)
    unused = free.pop()
    table = torch.full((len(needs), max(needs, default=0) + 1), unused, dtype=torch.int32)
    cache_shape = (LAYERS, len(free) + 1, case.page, case.kv_heads, case.dim)
    keys, values = torch.full(cache_shape, torch.nan), torch.full(cache_shape, torch.nan)
    for sequence, (need, length) in enumerate(zip(needs, case.lengths, strict=True)):
        pages = [free.pop() for _ in range(need)]
        table[sequence, :need] = torch.tensor(pages, dtype=torch.int32)
        place = torch.arange(length)
        page = table[sequence, place // case.page].long()
        for part in (keys, values):
            part[:, page, place % case.page] = torch.randn(
                LAYERS, length, case.kv_heads, case.dim, generator=noise
            )  # fmt: skip

    def rows_of(heads: int) -> Tensor:
        return torch.randn(sum(rows), heads, case.dim, generator=noise).to(device, case.dtype)

    cache = PagedCache(keys.to(device, case.dtype), values.to(device, case.dtype))
    batch = tree_batch(case.segments, case.lengths, table, device)
    return Filled(cache, batch, rows_of(case.heads), rows_of(case.kv_heads), rows_of(case.kv_heads))


def twin_cache(cache: PagedCache) -> PagedCache:
    """A copy."""
    return PagedCache(cache.keys.clone(), cache.values.clone())


def tokens_for(parents: Sequence[int], dice: random.Random, vocabulary: int) -> list[int]:
    """Tokens of a tree's nodes, distinct among siblings."""
    children: dict[int, list[int]] = {}
    tokens = []
    for parent in parents:
        taken = children.setdefault(parent, [])
        tokens.append(dice.choice([token for token in range(vocabulary) if token not in taken]))
        taken.append(tokens[-1])
    return tokens
