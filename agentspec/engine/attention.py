"""Attention of ragged token trees over pages, registered with transformers so that any decoder runs on it.

Keyword arguments of a model's `forward` reach the registered function, so the `Batch` travels as `segments`
and the model's own cache and mask machinery stay out of the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentspec.engine.kv import PageTable
from agentspec.errors import ModelError

NAME = "agentspec_tree"

LONG = 64
"""Rows from which on a segment is a prefill chunk and goes through torch's blocked attention."""

UNDERSTOOD = {
    "segments", "scaling", "sliding_window", "softcap", "dropout", "position_ids", "use_cache", "output_router_logits",
}  # fmt: skip
"""Arguments that models hand to their attention and that are honoured, or change nothing when nothing is trained."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One sequence's rows in a pass: a tree below its last committed token, or a chunk of its prompt."""

    table: PageTable
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    """Position of each row relative to the table's length."""

    parents: tuple[int, ...] | None
    """Row below which each row hangs, -1 for the root; None for a chain."""


class Batch:
    """The segments of one pass, and what their rows must not see, worked out once for all layers of a kind."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._hidden: dict[int | None, list[Tensor | None]] = {}

    def hidden(self, window: int | None) -> list[Tensor | None]:
        """For each segment, `hidden_from` it."""
        if window not in self._hidden:
            self._hidden[window] = [hidden_from(segment, window) for segment in self.segments]
        return self._hidden[window]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, manner: "Manner") -> Tensor:
        """As `Attending.attend`."""
        return attend_segments(q, k, v, self, layer, manner)


@dataclass(frozen=True, slots=True)
class Manner:
    """What a layer asks of its attention."""

    scaling: float
    """What scores are multiplied with."""

    window: int | None = None
    """Positions that a row sees, itself included; None for all."""

    softcap: float | None = None
    """Scores are bent to stay below this: softcap * tanh(score / softcap)."""


class Attending(Protocol):
    """The rows of a pass as a model's layers meet them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, manner: Manner) -> Tensor:
        """Keep the rows' keys and values, then attend for each row; (rows, heads, dim).

        q: (heads, rows, dim), k, v: (kv heads, rows, dim): the rows of all sequences side by side.
        """
        ...


def strangers(parent: Sequence[int]) -> Tensor:
    """(nodes, nodes) bool: node i must not see node j, which is neither i nor one of its ancestors."""
    mask = torch.eye(len(parent), dtype=torch.bool)
    for node, above in enumerate(parent):
        if above >= 0:
            mask[node] |= mask[above]
    return ~mask


def hidden_from(segment: Segment, window: int | None) -> Tensor | None:
    """(rows, cached + rows) bool: the keys that a row must not see; None where it sees all."""
    cached, rows = segment.table.length, len(segment.tokens)
    if rows == 1 and (window is None or cached < window):
        return None
    hidden = torch.zeros(rows, cached + rows, dtype=torch.bool)
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1) if segment.parents is None else strangers(segment.parents)
    hidden[:, cached:] = later
    if window is not None:
        own = torch.tensor(segment.depths) + cached
        hidden |= torch.cat([torch.arange(cached), own]) <= own[:, None] - window
    return hidden


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, manner: Manner) -> Tensor:
    """Attention of one segment's rows over its whole prefix and the rows that are not hidden from them.

    q: (heads, rows, dim); k, v: (kv heads, cached + rows, dim); returns (rows, heads, dim).
    """
    heads, rows, dim = q.shape
    groups = heads // k.shape[0]
    scores = torch.bmm((q * manner.scaling).reshape(k.shape[0], groups * rows, dim), k.transpose(1, 2))
    if manner.softcap is not None:
        scores = (scores / manner.softcap).tanh() * manner.softcap
    if hidden is not None:
        scores.view(k.shape[0], groups, rows, -1).masked_fill_(hidden, float("-inf"))
    return torch.bmm(scores.softmax(-1), v).view(heads, rows, dim).transpose(0, 1)


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scaling: float) -> Tensor:
    """`attend` for a causal chunk of many rows, without a soft cap."""
    seen = None if hidden is None else ~hidden
    out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def attend_segments(q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: int, manner: Manner) -> Tensor:
    """Writes the rows' keys and values behind their sequences' committed part, then attends segment by segment.

    q: (heads, rows, dim), k, v: (kv heads, rows, dim): all segments' rows side by side; returns (rows, heads, dim).
    """
    out = []
    start = 0
    for segment, hidden in zip(batch.segments, batch.hidden(manner.window), strict=True):
        table, rows = segment.table, len(segment.tokens)
        stop = start + rows
        table.write(layer, k[:, start:stop], v[:, start:stop])
        keys, values = table.keys_and_values(layer, table.length + rows)
        if rows >= LONG and segment.parents is None and manner.softcap is None:
            out.append(attend_chunk(q[:, start:stop], keys, values, hidden, manner.scaling))
        else:
            out.append(attend(q[:, start:stop], keys, values, hidden, manner))
        start = stop
    return out[0] if len(out) == 1 else torch.cat(out)


def tree_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls: q, k and v have a leading batch dimension of 1, as has the result; the
    `Attending` comes as `segments`.

    Raises `ModelError` where the model asks for attention of another kind.
    """
    strange = sorted(name for name in set(arguments) - UNDERSTOOD if arguments[name] is not None)
    if strange or not getattr(module, "is_causal", True):
        raise ModelError(f"attention with {', '.join(strange) or 'sight of later tokens'} is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    manner = Manner(arguments["scaling"], arguments.get("sliding_window"), arguments.get("softcap"))
    rows: Attending = arguments["segments"]
    return rows.attend(q[0], k[0], v[0], layer, manner).unsqueeze(0), None


def no_mask(*_: object, **__: object) -> None:
    """Masks are the segments' business."""


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, no_mask)
