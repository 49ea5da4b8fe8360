"""The common decoder block without a module call per operation: half of a one-row pass is otherwise Python.

Reads the weights of a transformers model of the Llama kind (pre-norm, rotary, gated MLP) and computes what its own
`forward` computes, but for the last bits. Families beyond `FAMILIES` run on their own `forward`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.engine.attention import Place, Segment, attend_segments, layer_views
from agentspec.engine.linear import FirstOfFused, PackedLinear

FAMILIES = ("llama", "mistral", "qwen2")


def is_lean(model: Any) -> bool:
    """Whether a prepacked model is one that `LeanDecoder` computes exactly."""
    config = model.config
    first = model.model.layers[0] if config.model_type in FAMILIES else None
    return (
        first is not None
        and config.hidden_act == "silu"
        and isinstance(first.self_attn.q_proj, FirstOfFused)
        and isinstance(first.mlp.gate_proj, FirstOfFused)
    )


def apply(linear: PackedLinear, x: Tensor) -> Tensor:
    """The linear's product without the cost of a module call."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, linear.packed, linear.bias, "none", [], "")
    return product


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square normalisation over `size` features, written with a sum in place of a mean: fewer operations."""

    weight: Tensor
    """The model's weight times the root of `size`."""

    epsilon: float
    """The model's epsilon times `size`."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.mul(x.square().sum(-1, keepdim=True).add_(self.epsilon).rsqrt_()).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights."""

    before_attention: Norm
    qkv: PackedLinear
    output: PackedLinear
    before_mlp: Norm
    gate_up: PackedLinear
    down: PackedLinear
    scaling: float


class LeanDecoder:
    """Computes the passes of a prepacked model; shares its weights."""

    def __init__(self, model: Any) -> None:
        config, inner = model.config, model.model
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.embedding: Tensor = inner.embed_tokens.weight
        self.rotary = inner.rotary_emb
        self.layers = [layer_of(block) for block in inner.layers]
        self.norm = norm_of(inner.norm)
        self.head: PackedLinear = model.lm_head

    def forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[Segment], keep: Sequence[int]) -> Tensor:
        """Logits (len(keep), vocabulary); tokens and positions are (rows,)."""
        x = self.embedding[tokens]
        cosine, sine = self.rotary(x, positions.unsqueeze(0))
        half = cosine.shape[-1] // 2
        cosine = cosine[0].unsqueeze(1)
        sine = torch.cat((-sine[0, :, :half], sine[0, :, half:]), -1).unsqueeze(1)
        places = [layer_views(segment) for segment in segments]
        for index, layer in enumerate(self.layers):
            here = [views[index] for views in places]
            attended = self._attention(layer, x, cosine, sine, segments, here)
            x = x + apply(layer.output, attended)
            gate, up = apply(layer.gate_up, layer.before_mlp(x)).chunk(2, -1)
            x = x + apply(layer.down, silu(gate).mul_(up))
        if len(keep) < len(x):
            x = x[torch.tensor(keep, dtype=torch.long)]
        return apply(self.head, self.norm(x)) if len(x) else x.new_empty(0, self.head.out_features)

    def _attention(
        self,
        layer: Layer,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        segments: Sequence[Segment],
        places: Sequence[Place],
    ) -> Tensor:
        rows, dim = len(x), cosine.shape[-1]
        qkv = apply(layer.qkv, layer.before_attention(x)).view(rows, -1, dim)
        turned = qkv[:, : self.heads + self.kv_heads]
        turned = turned * cosine + turned.roll(dim // 2, -1) * sine
        q, k = turned[:, : self.heads].transpose(0, 1), turned[:, self.heads :].transpose(0, 1)
        v = qkv[:, self.heads + self.kv_heads :].transpose(0, 1)
        return attend_segments(q, k, v, segments, places, layer.scaling).reshape(rows, -1)


def norm_of(module: Any) -> Norm:
    """The lean form of a model's normalisation."""
    size = module.weight.shape[0]
    return Norm(module.weight.detach() * math.sqrt(size), module.variance_epsilon * size)


def layer_of(block: Any) -> Layer:
    """The lean form of a model's block."""
    attention, mlp = block.self_attn, block.mlp
    return Layer(
        norm_of(block.input_layernorm),
        attention.q_proj.all,
        attention.o_proj,
        norm_of(block.post_attention_layernorm),
        mlp.gate_proj.all,
        mlp.down_proj,
        attention.scaling,
    )
