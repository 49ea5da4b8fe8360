"""Attention of ragged token trees over slabs, registered with transformers so that any decoder runs on it.

Keyword arguments of a model's `forward` reach the registered function, so the batch travels as `segments`
and the model's own cache and mask machinery stay out of the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentspec.engine.kv import BLOCK, Slab

NAME = "agentspec_tree"

LONG = 64
"""Rows from which on a segment is a prefill chunk and goes through torch's blocked attention."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One sequence's rows in a pass: a tree below its last committed token, or a chunk of its prompt."""

    slab: Slab
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    """Position of each row relative to the slab's length."""

    parents: tuple[int, ...] | None
    """Row below which each row hangs, -1 for the root; None for a chain."""


def strangers(parent: Sequence[int]) -> Tensor:
    """(nodes, nodes) bool: node i must not see node j, which is neither i nor one of its ancestors."""
    mask = torch.eye(len(parent), dtype=torch.bool)
    for node, above in enumerate(parent):
        if above >= 0:
            mask[node] |= mask[above]
    return ~mask


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scaling: float) -> Tensor:
    """Attention of one segment's rows over its whole prefix and the rows that are not hidden from them.

    q: (heads, rows, dim); k, v: (kv heads, cached + rows, dim); returns (rows, heads, dim).
    """
    heads, rows, dim = q.shape
    groups = heads // k.shape[0]
    scores = torch.bmm((q * scaling).reshape(k.shape[0], groups * rows, dim), k.transpose(1, 2))
    if rows > 1:
        inside = scores.view(k.shape[0], groups, rows, -1)[..., -rows:]
        later = torch.ones(rows, rows, dtype=torch.bool).triu(1) if hidden is None else hidden
        inside.masked_fill_(later, float("-inf"))
    return torch.bmm(scores.softmax(-1), v).view(heads, rows, dim).transpose(0, 1)


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """`attend` for a causal chunk of many rows."""
    rows, total = q.shape[1], k.shape[1]
    seen = torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
    out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def attend_segments(q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment], layer: int, scaling: float) -> Tensor:
    """Writes the rows' keys and values behind their slabs' committed part, then attends segment by segment.

    q: (heads, rows, dim), k, v: (kv heads, rows, dim): all segments' rows side by side; returns (rows, heads, dim).
    """
    out = []
    start = 0
    for segment in segments:
        slab, rows = segment.slab, len(segment.tokens)
        stop, total = start + rows, slab.length + rows
        place = torch.arange(slab.length, total)
        keys, values = slab.k[layer], slab.v[layer]
        keys[:, place // BLOCK, :, place % BLOCK] = k[:, start:stop].transpose(0, 1)
        values[:, place // BLOCK, place % BLOCK] = v[:, start:stop]
        keys = keys.transpose(2, 3).flatten(1, 2)[:, :total]
        values = values.flatten(1, 2)[:, :total]
        if rows >= LONG and segment.parents is None:
            out.append(attend_chunk(q[:, start:stop], keys, values, scaling))
        else:
            hidden = None if segment.parents is None else strangers(segment.parents)
            out.append(attend(q[:, start:stop], keys, values, hidden, scaling))
        start = stop
    return out[0] if len(out) == 1 else torch.cat(out)


def tree_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls: q, k and v have a leading batch dimension of 1, as has the result."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attend_segments(q[0], k[0], v[0], arguments["segments"], layer, arguments["scaling"])
    return out.unsqueeze(0), None


def no_mask(*_: object, **__: object) -> None:
    """Masks are the segments' business."""


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, no_mask)
