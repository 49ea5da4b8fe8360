"""Tiny random models of every family that is compiled, and what transformers computes with them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from agentspec.engine.attention import NAME

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "attn_implementation": NAME,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
GEMMA3_POSITIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}


def longrope(turned: int, original: int, **others: Any) -> dict[str, Any]:
    """A configuration of LongRoPE for `turned` numbers of a head, with other factors beyond `original` positions."""
    half = turned // 2
    factors = {"short_factor": [1 + i / half for i in range(half)], "long_factor": [2 + i for i in range(half)]}
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **others}
    return {"original_max_position_embeddings": original, "rope_parameters": parameters}


def made_with(config: type, model: type, **changes: Any) -> Any:
    """A random model, the same every time."""
    torch.manual_seed(4)
    return model(config(**{**SIZES, **changes}))


def gemma3(**changes: Any) -> Any:
    return made_with(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        **{"head_dim": 32, "sliding_window": 19, "sliding_window_pattern": 2, "query_pre_attn_scalar": 50, **changes},
    )


def gemma2(**changes: Any) -> Any:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return made_with(
        Gemma2Config,
        Gemma2ForCausalLM,
        **{"head_dim": 32, "sliding_window": 19, "query_pre_attn_scalar": 50, **caps, **changes},
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: made_with(LlamaConfig, LlamaForCausalLM),
    "llama tied, biased, scaled": lambda: made_with(
        LlamaConfig,
        LlamaForCausalLM,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LINEAR,
    ),
    "llama odd sizes": lambda: made_with(
        LlamaConfig, LlamaForCausalLM, hidden_size=44, intermediate_size=27, vocab_size=101, head_dim=64
    ),
    "llama many heads": lambda: made_with(
        LlamaConfig, LlamaForCausalLM, hidden_size=120, num_attention_heads=30, num_key_value_heads=1, head_dim=32
    ),
    "llama one head": lambda: made_with(
        LlamaConfig, LlamaForCausalLM, num_attention_heads=1, num_key_value_heads=1, head_dim=256
    ),
    "qwen2": lambda: made_with(Qwen2Config, Qwen2ForCausalLM),
    "qwen3": lambda: made_with(Qwen3Config, Qwen3ForCausalLM, head_dim=96),
    "mistral": lambda: made_with(MistralConfig, MistralForCausalLM, sliding_window=None),
    "phi 3": lambda: made_with(Phi3Config, Phi3ForCausalLM),
    "phi 4 mini": lambda: made_with(
        Phi3Config,
        Phi3ForCausalLM,
        tie_word_embeddings=True,
        **longrope(24, 200, partial_rotary_factor=0.75),
    ),
    "smollm 3": lambda: made_with(
        SmolLM3Config, SmolLM3ForCausalLM, no_rope_layers=[1, 0, 1], attention_bias=True, mlp_bias=True
    ),
    "gemma 2": gemma2,
    "gemma 3": lambda: gemma3(rope_parameters=GEMMA3_POSITIONS),
    "gemma 3 odd sizes": lambda: gemma3(
        hidden_size=44, intermediate_size=27, head_dim=256, num_key_value_heads=1, final_logit_softcapping=3.0
    ),
}


def made(name: str) -> Any:
    """One of `MODELS`, with biases and norms that are not the initial zeros and ones."""
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def by_transformers(model: Any, tokens: Sequence[int], linear: type = torch.nn.Linear) -> torch.Tensor:
    """Logits of all tokens, computed by transformers alone."""
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = linear
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        logits: torch.Tensor = plain.eval()(torch.tensor([list(tokens)])).logits[0]
    return logits
