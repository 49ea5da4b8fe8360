"""Models that the compiled decoder computes: reads their weights into it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentspec.engine.attention import Segment
from agentspec.engine.linear import joined_bias
from agentspec.kernels.cpu.decoder import Decoder, Floats, LayerWeights, Rows, Shape
from agentspec.kernels.cpu.lanes import LANES, can_compute

FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""Model types whose block is the decoder's."""

ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles depend on the position alone."""


def is_compilable(model: Any) -> bool:
    """Whether the compiled decoder computes what the model's own `forward` does."""
    config = model.config
    return (
        can_compute()
        and config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and head_dim(config) % LANES == 0
        and model.model.rotary_emb.rope_type in ROTARY
        and angles(model, 1)[0].shape[1] * 2 == head_dim(config)
        and model.lm_head.bias is None
    )


def head_dim(config: Any) -> int:
    """Size of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def floats(tensor: Tensor | None) -> Floats | None:
    """A weight as float32 numbers; None of none."""
    if tensor is None:
        return None
    array: Floats = tensor.detach().float().contiguous().numpy()
    return array


def angles(model: Any, window: int) -> tuple[Floats, Floats]:
    """Cosines and sines of every position up to `window`, (window, dim / 2)."""
    cosine, sine = model.model.rotary_emb(torch.zeros(1), torch.arange(window).unsqueeze(0))
    half = cosine.shape[-1] // 2
    return (needed(floats(cosine[0, :, :half])), needed(floats(sine[0, :, :half])))


def needed(array: Floats | None) -> Floats:
    """A weight that every model has."""
    assert array is not None
    return array


def window_of(attention: Any, config: Any) -> int:
    """Positions that a layer sees, the row itself included, 0 for all: what its `forward` hands to its attention,
    whatever else the configuration says."""
    window = (
        config.sliding_window
        if config.model_type in ("mistral", "phi3")
        else getattr(attention, "sliding_window", None)
    )
    return window or 0


def projections(attention: Any) -> tuple[Any, ...]:
    """The linears of queries, keys and values, or the one of all three."""
    if hasattr(attention, "qkv_proj"):
        return (attention.qkv_proj,)
    return attention.q_proj, attention.k_proj, attention.v_proj


def gate_and_up(mlp: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Weights and biases of a gated MLP's first two products, which may be stored as one."""
    if hasattr(mlp, "gate_up_proj"):
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        return gate, up, None, None
    return mlp.gate_proj.weight, mlp.up_proj.weight, mlp.gate_proj.bias, mlp.up_proj.bias


def layer_weights(block: Any, window: int) -> LayerWeights:
    """The weights of one block."""
    attention, mlp = block.self_attn, block.mlp
    linears = projections(attention)
    gate, up, gate_bias, up_bias = gate_and_up(mlp)
    return LayerWeights(
        norm=needed(floats(block.input_layernorm.weight)),
        qkv=needed(floats(torch.cat([linear.weight for linear in linears]))),
        output=needed(floats(attention.o_proj.weight)),
        mlp_norm=needed(floats(block.post_attention_layernorm.weight)),
        gate=needed(floats(gate)),
        up=needed(floats(up)),
        down=needed(floats(mlp.down_proj.weight)),
        qkv_bias=floats(joined_bias(linears)),
        output_bias=floats(attention.o_proj.bias),
        gate_bias=floats(gate_bias),
        up_bias=floats(up_bias),
        down_bias=floats(mlp.down_proj.bias),
        query_norm=floats(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
        key_norm=floats(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
        window=window,
        rotary=bool(getattr(attention, "use_rope", True)),
    )


@torch.inference_mode()
def compiled_decoder(model: Any, threads: int, quantised: bool) -> Decoder:
    """The compiled decoder of a model, whose weights it takes: the model itself cannot compute any more."""
    config, inner = model.config, model.model
    shape = Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=head_dim(config),
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        epsilon=config.rms_norm_eps,
        scaling=inner.layers[0].self_attn.scaling,
    )
    embedding = inner.embed_tokens.weight
    tied = model.lm_head.weight.data_ptr() == embedding.data_ptr()
    decoder = Decoder(
        shape,
        needed(floats(embedding)),
        None if tied else floats(model.lm_head.weight),
        needed(floats(inner.norm.weight)),
        angles(model, config.max_position_embeddings),
        threads,
        quantised=quantised,
    )
    for block in inner.layers:
        decoder.add_layer(layer_weights(block, window_of(block.self_attn, config)))
        release(block)
    release(inner.embed_tokens)
    release(model.lm_head)
    decoder.start()
    return decoder


def release(module: torch.nn.Module) -> None:
    """Free a module's weights, which have been copied."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            setattr(child, name, torch.nn.Parameter(parameter.new_empty(0), requires_grad=False))


def rows_of(segment: Segment) -> Rows:
    """A segment for the compiled decoder."""
    table = segment.table
    pages = [page.address for page in table.pages]
    return Rows(segment.tokens, segment.depths, segment.parents, table.length, pages)


def compiled_forward(decoder: Decoder, segments: Sequence[Segment], keep: Sequence[int]) -> Tensor:
    """Logits (len(keep), vocabulary) of the kept rows."""
    return torch.from_numpy(np.asarray(decoder.forward([rows_of(segment) for segment in segments], keep)))
