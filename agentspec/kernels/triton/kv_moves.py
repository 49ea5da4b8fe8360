"""Writing rows' keys and values into pages, and moving those of accepted nodes to their final slots."""

import torch
from torch import Tensor

from agentspec.errors import KernelError
from agentspec.kernels.triton.backend import runs_triton
from agentspec.kernels.triton.batch import PagedCache, TreeBatch, slots_of


def append(k: Tensor, v: Tensor, cache: PagedCache, layer: int, batch: TreeBatch) -> None:
    """Write the rows' keys and values behind their sequences' cached positions, in the order of the rows.

    k, v: (rows, kv heads, dim), the features of a head side by side. The block table must name pages for all rows.
    """
    expected = (batch.rows, cache.heads, cache.dim)
    if tuple(k.shape) != expected or v.shape != k.shape or k.stride(2) != 1 or v.stride(2) != 1:
        raise KernelError(
            f"keys {tuple(k.shape)} and values {tuple(v.shape)} must be {expected}, features side by side"
        )
    if batch.rows == 0:
        return
    if not runs_triton(k):
        return append_reference(k, v, cache, layer, batch)
    from agentspec.kernels.triton.kv_moves_triton import launch_append

    launch_append(k, v, cache, layer, batch)


def compact(cache: PagedCache, batch: TreeBatch, outcome: Tensor) -> None:
    """Move the keys and values of accepted nodes to the slots behind the cached positions, in all layers, in place.

    outcome: the walk's, int32 on the cache's device, so that nothing waits for the host. Slots behind the accepted ones
    may hold anything afterwards. A chunk's rows are where they belong already.
    """
    if outcome.shape[0] != batch.sequences:
        raise KernelError(f"an outcome of {outcome.shape[0]} sequences for a batch of {batch.sequences}")
    if batch.sequences == 0:
        return
    if not runs_triton(cache.keys):
        return compact_reference(cache, batch, outcome)
    from agentspec.kernels.triton.kv_moves_triton import launch_compact

    launch_compact(cache, batch, outcome)


def append_reference(k: Tensor, v: Tensor, cache: PagedCache, layer: int, batch: TreeBatch) -> None:
    """`append`, by indexing."""
    rows = torch.nonzero(batch.owner >= 0).flatten()
    sequence = batch.owner[rows].long()
    positions = batch.length[sequence] + rows - batch.start[sequence]
    slots = slots_of(batch, cache.page, positions, sequence)
    cache.keys[layer, slots // cache.page, slots % cache.page] = k[rows]
    cache.values[layer, slots // cache.page, slots % cache.page] = v[rows]


def compact_reference(cache: PagedCache, batch: TreeBatch, outcome: Tensor) -> None:
    """`compact`, sequence by sequence, with a copy of what moves."""
    for sequence, (count, _, *path) in enumerate(outcome.tolist()):
        if batch.chunk[sequence]:
            continue
        node = torch.tensor(path[:count], device=outcome.device, dtype=torch.int64)
        cached = batch.length[sequence].long()
        owner = torch.full_like(node, sequence)
        source = slots_of(batch, cache.page, cached + node, owner)
        target = slots_of(batch, cache.page, cached + torch.arange(len(node), device=node.device), owner)
        for part in (cache.keys, cache.values):
            part[:, target // cache.page, target % cache.page] = part[:, source // cache.page, source % cache.page]
