"""Attention of a ragged batch of token trees over keys and values in pages."""

from itertools import pairwise

import torch
from torch import Tensor

from agentspec.errors import KernelError
from agentspec.kernels.triton.backend import runs_triton
from agentspec.kernels.triton.batch import DIMS, PagedCache, TreeBatch, slots_of
from agentspec.kernels.triton.blocks import Blocks, BlockTable, gpu_milliseconds


def attend(
    q: Tensor,
    cache: PagedCache,
    layer: int,
    batch: TreeBatch,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    table: BlockTable | None = None,
) -> Tensor:
    """Every row over its sequence's cached positions, the nodes above it and itself; (rows, heads, dim).

    q: (rows, heads, dim), the features of a head side by side. The rows' own keys and values are in the cache already.
    scaling: what scores are multiplied with; window: positions that a row sees, itself included; softcap: scores are
    bent to softcap * tanh(score / softcap). Rows that pad the batch get no defined result. Where there is a table,
    block sizes are picked from it. Raises `KernelError` for shapes and types that the kernel does not know.
    """
    check(q, cache, batch, window, softcap)
    if batch.rows == 0 or batch.most_rows == 0:
        return torch.empty_like(q)
    if not runs_triton(q):
        return attend_reference(q, cache, layer, batch, scaling, window, softcap)
    from agentspec.kernels.triton.tree_attention_triton import launch

    def run(blocks: Blocks) -> Tensor:
        return launch(q, cache, layer, batch, scaling, window or 0, softcap or 0.0, blocks)

    if table is None or not q.is_cuda:
        return run(default_blocks(q, cache, batch))
    choices = candidates(q, cache, batch)
    name = shape_name(q, cache, batch, window, softcap)
    return run(table.pick(name, choices, lambda blocks: gpu_milliseconds(lambda: run(blocks))))


def check(q: Tensor, cache: PagedCache, batch: TreeBatch, window: int | None, softcap: float | None) -> None:
    """Raises `KernelError` for what the kernel cannot compute."""
    if q.dim() != 3 or q.shape[0] != batch.rows or q.shape[2] != cache.dim or q.stride(2) != 1:
        raise KernelError(f"queries {tuple(q.shape)} do not fit {batch.rows} rows of {cache.dim} features")
    if cache.dim not in DIMS:
        raise KernelError(f"heads must have {', '.join(map(str, DIMS))} features, got {cache.dim}")
    if q.shape[1] % cache.heads:
        raise KernelError(f"{q.shape[1]} query heads cannot share {cache.heads} heads of keys")
    if q.dtype != cache.keys.dtype:
        raise KernelError(f"queries are {q.dtype}, keys {cache.keys.dtype}")
    if window is not None and window < 1:
        raise KernelError(f"a window must be 1 position at least, got {window}")
    if softcap is not None and not softcap > 0:
        raise KernelError(f"a soft cap must be above 0, got {softcap}")


def power_of_two(number: int) -> int:
    """The smallest that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def default_blocks(q: Tensor, cache: PagedCache, batch: TreeBatch) -> Blocks:
    """Sizes that fit any GPU since 2020: a tile of keys and one of values take 32 KiB at most."""
    group = q.shape[1] // cache.heads
    most = 32 if q.dtype == torch.float32 else 64
    rows = max(power_of_two(group), 16, min(power_of_two(batch.most_rows * group), most))
    columns = max(16, min(64, 2**14 // (power_of_two(cache.dim) * q.element_size())))
    return Blocks(rows, columns, 1024, warps=4, stages=1 if q.dtype == torch.float32 else 2)


def candidates(q: Tensor, cache: PagedCache, batch: TreeBatch) -> list[Blocks]:
    """What is timed for a shape, the default first: larger and smaller tiles, longer and shorter parts."""
    base = default_blocks(q, cache, batch)
    least = max(16, power_of_two(q.shape[1] // cache.heads))
    grown = [Blocks(max(least, rows), columns, split, warps, stages)
             for rows, columns, split, warps, stages in (
                 (base.rows, base.columns, 256, 4, 2),
                 (base.rows, 2 * base.columns, 512, 4, 2),
                 (base.rows, base.columns, 4096, 4, 3),
                 (base.rows * 2, base.columns, 2048, 8, 2),
                 (base.rows * 2, base.columns, 1 << 20, 8, 3),
                 (base.rows // 2, base.columns, 512, 2, 3),
             )]  # fmt: skip
    return list(dict.fromkeys([base, *grown]))


def shape_name(q: Tensor, cache: PagedCache, batch: TreeBatch, window: int | None, softcap: float | None) -> str:
    """What block sizes depend on; numbers that change from step to step are rounded up to powers of two."""
    sizes = [power_of_two(size) for size in (batch.sequences, batch.most_rows, batch.most_positions)]
    kind = str(q.dtype).removeprefix("torch.")
    return (
        f"tree attention, {sizes[0]} sequences, {sizes[1]} rows, {sizes[2]} positions, {q.shape[1]} heads on "
        f"{cache.heads}, dim {cache.dim}, page {cache.page}, {kind}, window {window}, cap {softcap is not None}"
    )


def attend_reference(
    q: Tensor,
    cache: PagedCache,
    layer: int,
    batch: TreeBatch,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`attend`, sequence by sequence, with its scores laid out whole and in float32."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts = batch.start.tolist()
    for sequence, (first, past) in enumerate(pairwise(starts)):
        if first == past:
            continue
        keys, values = (gathered(part[layer], batch, sequence).float() for part in (cache.keys, cache.values))
        group = q.shape[1] // cache.heads
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("rhd,phd->hrp", q[first:past].float(), keys) * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        weights = scores.masked_fill(~visible(batch, sequence, window), float("-inf")).softmax(-1)
        out[first:past] = torch.einsum("hrp,phd->rhd", weights, values).to(q.dtype)
    return out


def gathered(pages: Tensor, batch: TreeBatch, sequence: int) -> Tensor:
    """(positions, kv heads, dim): what a sequence has in the pages of one layer, its rows of this pass included."""
    page = pages.shape[1]
    total = int(batch.length[sequence] + batch.start[sequence + 1] - batch.start[sequence])
    positions = torch.arange(total, device=pages.device)
    slots = slots_of(batch, page, positions, torch.full_like(positions, sequence))
    return pages[slots // page, slots % page]


def visible(batch: TreeBatch, sequence: int, window: int | None) -> Tensor:
    """(rows, positions) bool: what each row of a sequence sees."""
    first, past = batch.start[sequence : sequence + 2].tolist()
    cached, rows = int(batch.length[sequence]), past - first
    node = torch.arange(rows, device=batch.start.device)
    if batch.chunk[sequence]:
        inside = node[None, :] <= node[:, None]
    else:
        inside = (batch.ancestors[first:past, node // 32] >> (node % 32)) & 1 != 0
    seen = torch.cat([inside.new_ones(rows, cached), inside], 1)
    if window is not None:
        own = cached + batch.depth[first:past]
        place = torch.cat([torch.arange(cached, device=own.device), own])
        seen = seen & (place[None, :] > own[:, None] - window)
    return seen
