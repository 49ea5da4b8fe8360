"""The kernels that write and move keys and values."""

import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton.batch import PagedCache, TreeBatch

ROWS = 16
"""Rows that a program writes."""


@triton.jit
def append_rows(
    k, v, keys, values, start, length, table, owner,
    total, k_row, k_head, v_row, v_head, c_page, c_slot, c_head, table_row,
    DIM: tl.constexpr, FEATURES: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows of one head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    sequence = tl.load(owner + row, mask=row < total, other=-1)
    live = sequence >= 0
    position = tl.load(length + sequence, mask=live, other=0) + row - tl.load(start + sequence, mask=live, other=0)
    page = tl.load(table + sequence.to(tl.int64) * table_row + position // PAGE, mask=live, other=0).to(tl.int64)
    feature = tl.arange(0, FEATURES)
    mask = live[:, None] & (feature < DIM)[None, :]
    place = (page * c_page + (position % PAGE) * c_slot + head * c_head)[:, None] + feature[None, :]
    row = row.to(tl.int64)
    new_k = tl.load(k + (row * k_row + head * k_head)[:, None] + feature[None, :], mask=mask)
    new_v = tl.load(v + (row * v_row + head * v_head)[:, None] + feature[None, :], mask=mask)
    tl.store(keys + place, new_k, mask=mask)
    tl.store(values + place, new_v, mask=mask)


@triton.jit(do_not_specialize=["width"])
def compact_path(
    keys, values, length, table, chunk, outcome,
    c_layer, c_page, c_slot, c_head, table_row, width,
    DIM: tl.constexpr, FEATURES: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The accepted path of one sequence in one layer and head.

    The i-th node of a path is node i or a later one, so in the path's order no slot is overwritten before it was read;
    the barriers keep one step's loads before its stores, and these before the next step's loads.
    """
    sequence = tl.program_id(0)
    if tl.load(chunk + sequence) != 0:
        return
    cached = tl.load(length + sequence)
    outcome += sequence * width
    count = tl.load(outcome)
    table += sequence.to(tl.int64) * table_row
    base = tl.program_id(1).to(tl.int64) * c_layer + tl.program_id(2) * c_head
    feature = tl.arange(0, FEATURES)
    mask = feature < DIM
    for step in range(0, count):
        node = tl.load(outcome + 2 + step)
        if node != step:
            source = cached + node
            target = cached + step
            from_page = tl.load(table + source // PAGE).to(tl.int64)
            to_page = tl.load(table + target // PAGE).to(tl.int64)
            old = base + from_page * c_page + (source % PAGE) * c_slot + feature
            new = base + to_page * c_page + (target % PAGE) * c_slot + feature
            moved_k = tl.load(keys + old, mask=mask)
            moved_v = tl.load(values + old, mask=mask)
            tl.debug_barrier()
            tl.store(keys + new, moved_k, mask=mask)
            tl.store(values + new, moved_v, mask=mask)
            tl.debug_barrier()


def launch_append(k: Tensor, v: Tensor, cache: PagedCache, layer: int, batch: TreeBatch) -> None:
    """`kv_moves.append`."""
    keys, values = cache.keys[layer], cache.values[layer]
    append_rows[triton.cdiv(batch.rows, ROWS), cache.heads](
        k, v, keys, values, batch.start, batch.length, batch.table, batch.owner,
        batch.rows, k.stride(0), k.stride(1), v.stride(0), v.stride(1), *keys.stride()[:3], batch.table.stride(0),
        DIM=cache.dim, FEATURES=triton.next_power_of_2(cache.dim), PAGE=cache.page, ROWS=ROWS,
    )  # fmt: skip


def launch_compact(cache: PagedCache, batch: TreeBatch, outcome: Tensor) -> None:
    """`kv_moves.compact`."""
    compact_path[batch.sequences, cache.keys.shape[0], cache.heads](
        cache.keys, cache.values, batch.length, batch.table, batch.chunk, outcome,
        *cache.keys.stride()[:4], batch.table.stride(0), outcome.stride(0),
        DIM=cache.dim, FEATURES=triton.next_power_of_2(cache.dim), PAGE=cache.page, num_warps=1, num_stages=1,
    )  # fmt: skip
