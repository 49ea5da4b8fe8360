"""Models that the compiled decoder computes: reads their weights into it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentspec.engine.attention import Segment
from agentspec.engine.linear import joined_bias
from agentspec.engine.rotary import KINDS, Table, angles, kinds, turned
from agentspec.kernels.cpu.decoder import Decoder, Floats, LayerWeights, Rows, Shape
from agentspec.kernels.cpu.lanes import LANES, can_compute

CENTRED = ("gemma2", "gemma3_text")
"""Model types whose norms hold what their factors are above one."""

FAMILIES = (*CENTRED, "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""Model types whose block is the decoder's."""

GATES = {"silu": False, "gelu_pytorch_tanh": True}
"""Activations of an MLP's gate that the decoder has, and which of them is the gelu."""


def is_compilable(model: Any) -> bool:
    """Whether the compiled decoder computes what the model's own `forward` does."""
    return can_compute() and model.config.model_type in FAMILIES and has_known_parts(model)


def has_known_parts(model: Any) -> bool:
    """Whether the decoder has all that a model of a known family asks for."""
    config, rotary = model.config, model.model.rotary_emb
    return (
        gate_of(config) in GATES
        and head_dim(config) % LANES == 0
        and set(kinds(rotary).values()) <= KINDS
        and (turned(rotary) == {head_dim(config)} or (config.model_type == "phi3" and len(turned(rotary)) == 1))
        and all(getattr(block.self_attn, "is_causal", True) for block in model.model.layers)
        and model.lm_head.bias is None
    )


def gate_of(config: Any) -> str:
    """Name of the activation of an MLP's gate."""
    return str(config.hidden_activation if config.model_type in CENTRED else config.hidden_act)


def head_dim(config: Any) -> int:
    """Size of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def floats(tensor: Tensor | None) -> Floats | None:
    """A weight as float32 numbers; None of none."""
    if tensor is None:
        return None
    array: Floats = tensor.detach().float().contiguous().numpy()
    return array


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


def norm_factors(norm: Any, config: Any) -> Floats:
    """What a norm multiplies with."""
    weight = norm.weight.detach().float()
    return needed(floats(weight + 1 if config.model_type in CENTRED else weight))


def norms_of(block: Any, config: Any) -> dict[str, Floats]:
    """The norms of one block: those around attention and the MLP, and those of heads' queries and keys."""
    attention = block.self_attn
    places = {"norm": block.input_layernorm, "mlp_norm": block.post_attention_layernorm}
    if hasattr(block, "pre_feedforward_layernorm"):
        places["output_norm"] = block.post_attention_layernorm
        places["mlp_norm"] = block.pre_feedforward_layernorm
        places["down_norm"] = block.post_feedforward_layernorm
    if hasattr(attention, "q_norm"):
        places |= {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
    return {place: norm_factors(norm, config) for place, norm in places.items()}


def layer_weights(block: Any, config: Any, tables: Mapping[str | None, Table]) -> LayerWeights:
    """The weights of one block."""
    attention, mlp = block.self_attn, block.mlp
    linears = projections(attention)
    gate, up, gate_bias, up_bias = gate_and_up(mlp)
    norms: dict[str, Any] = norms_of(block, config)
    table = tables[None] if None in tables else tables[attention.layer_type]
    return LayerWeights(
        **norms,
        qkv=needed(floats(torch.cat([linear.weight for linear in linears]))),
        output=needed(floats(attention.o_proj.weight)),
        gate=needed(floats(gate)),
        up=needed(floats(up)),
        down=needed(floats(mlp.down_proj.weight)),
        qkv_bias=floats(joined_bias(linears)),
        output_bias=floats(attention.o_proj.bias),
        gate_bias=floats(gate_bias),
        up_bias=floats(up_bias),
        down_bias=floats(mlp.down_proj.bias),
        window=window_of(attention, config),
        rotary=table if getattr(attention, "use_rope", True) else None,
    )


def shape_of(model: Any, window: int) -> Shape:
    """What the decoder must know of a model beside its weights."""
    config, inner = model.config, model.model
    capped = config.model_type in CENTRED
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=head_dim(config),
        rotary=turned(inner.rotary_emb).pop(),
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=window,
        epsilon=config.rms_norm_eps,
        scaling=inner.layers[0].self_attn.scaling,
        embedding_scale=getattr(inner.embed_tokens, "scalar_embed_scale", 1.0),
        gelu=GATES[gate_of(config)],
        score_cap=(config.attn_logit_softcapping if config.model_type == "gemma2" else None) or 0.0,
        logit_cap=(config.final_logit_softcapping if capped else None) or 0.0,
    )


@torch.inference_mode()
def compiled_decoder(model: Any, window: int, threads: int, quantised: bool) -> Decoder:
    """The compiled decoder of a model, for `window` positions; it takes the weights: the model itself cannot compute
    any more."""
    inner = model.model
    embedding = inner.embed_tokens.weight
    tied = model.lm_head.weight.data_ptr() == embedding.data_ptr()
    decoder = Decoder(
        shape_of(model, window),
        needed(floats(embedding)),
        None if tied else floats(model.lm_head.weight),
        norm_factors(inner.norm, model.config),
        threads,
        quantised=quantised,
    )
    tables = angles(inner.rotary_emb, window)
    for block in inner.layers:
        decoder.add_layer(layer_weights(block, model.config, tables))
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
