"""Medians on one GPU: tree attention beside torch's with an explicit mask, and a whole verify, by nodes and context."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentspec.kernels.triton.batch import PagedCache, TreeBatch, tree_batch
from agentspec.kernels.triton.blocks import BlockTable, gpu_milliseconds
from agentspec.kernels.triton.tree_attention import attend, gathered, visible
from agentspec.kernels.triton.tree_walk import choose, walk
from bench.gpu_cases import random_tree
from bench.gpu_model import Decoder, Sizes, empty_cache, make_decoder

NODES = (1, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (256, 2048, 8192, 32768)
DTYPE = torch.bfloat16
DEVICE = "cuda"


def graphed(run: Callable[[], Any]) -> Callable[[], None]:
    """The same work, replayed as a CUDA graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def filled(sizes: Sizes) -> tuple[PagedCache, Tensor]:
    """A cache for the longest context with room for the largest tree."""
    cache, table = empty_cache(sizes, 1, CONTEXTS[-1] + NODES[-1], DEVICE, DTYPE)
    for part in (cache.keys, cache.values):
        part.normal_()
    return cache, table


def attention_times(q: Tensor, cache: PagedCache, batch: TreeBatch, table: BlockTable) -> dict[str, float]:
    """Tree attention of one layer; torch's over keys and values that lie side by side already."""
    keys, values = (
        gathered(part[0], batch, 0).transpose(0, 1)[None].contiguous() for part in (cache.keys, cache.values)
    )
    mask = visible(batch, 0, None)[None, None]
    queries = q.transpose(0, 1)[None].contiguous()

    def theirs() -> Tensor:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

    scaling = cache.dim**-0.5
    ours = attend(q, cache, 0, batch, scaling, table=table)
    error = float((ours.float() - theirs()[0].transpose(0, 1).float()).abs().max())
    return {
        "attention_ms": gpu_milliseconds(lambda: attend(q, cache, 0, batch, scaling, table=table)),
        "sdpa_ms": gpu_milliseconds(theirs),
        "difference": error,
    }


def verify_times(
    model: Decoder, cache: PagedCache, batch: TreeBatch, table: BlockTable, graphs: bool
) -> dict[str, float]:
    """A pass over the tree, choices and walk."""
    token = torch.arange(batch.rows, dtype=torch.int32, device=DEVICE)

    def verify() -> None:
        walk(choose(model(token, batch, cache, table)), token, batch)

    times = {"verify_ms": gpu_milliseconds(verify, 10)}
    if graphs:
        times["verify_graph_ms"] = gpu_milliseconds(graphed(verify), 10)
    return times


@torch.inference_mode()
def timings(table: BlockTable, graphs: bool) -> dict[str, Any]:
    """Rows by context and number of nodes."""
    sizes = Sizes()
    model = make_decoder(sizes, DEVICE, DTYPE)
    cache, pages = filled(sizes)
    rows = []
    for context in CONTEXTS:
        for nodes in NODES:
            batch = tree_batch([random_tree(nodes)], [context], pages, DEVICE)
            q = torch.randn(nodes, sizes.heads, sizes.dim, device=DEVICE, dtype=DTYPE)
            row: dict[str, float] = {"context": context, "nodes": nodes}
            row |= attention_times(q, cache, batch, table) | verify_times(model, cache, batch, table, graphs)
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            rows.append(row)
    return {"model": {name: getattr(sizes, name) for name in Sizes.__slots__}, "dtype": "bfloat16", "rows": rows}
