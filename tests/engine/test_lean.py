"""The lean decoder against the models' own forward, family by family."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentspec.engine.attention import NAME, Segment, strangers
from agentspec.engine.kv import Slab
from agentspec.engine.lean import is_lean
from agentspec.engine.target import Target
from agentspec.errors import ModelError

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "attn_implementation": NAME,
}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama tied, biased, scaled": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=SCALED)
    ),
    "llama wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
}


def passes(target: Target) -> list[torch.Tensor]:
    """A prompt in two chunks beside another sequence's tree, then a tree of its own, with logits of all rows."""
    first, second = Slab(target.shape), Slab(target.shape)
    chunk = Segment(first, tuple(range(20)), tuple(range(20)), None)
    out = [target.forward([chunk], range(20))]
    first.commit(range(20))
    parents = (-1, 0, 0, 1, 3)
    tree = Segment(first, (5, 6, 7, 8, 9), (0, 1, 1, 2, 3), strangers(parents))
    other = Segment(second, (1, 2, 3), (0, 1, 2), None)
    out.append(target.forward([tree, other], [0, 1, 2, 3, 4, 7]))
    first.commit([0, 1, 3])
    out.append(target.forward([Segment(first, (11,), (0,), None)], [0]))
    out.append(target.forward([Segment(first, (11, 12), (0, 1), None)], []))
    return out


@pytest.mark.parametrize("name", MODELS)
def test_the_lean_decoder_computes_what_the_model_computes(name: str) -> None:
    torch.manual_seed(3)
    target = Target(MODELS[name]())
    assert target.lean is not None
    lean = passes(target)
    target.lean = None
    for mine, own in zip(lean, passes(target), strict=True):
        assert mine.shape == own.shape
        torch.testing.assert_close(mine, own, atol=2e-5, rtol=1e-5)


def test_what_the_lean_decoder_does_not_know_runs_on_its_own_forward() -> None:
    odd = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu"))
    assert not is_lean(odd)
    assert Target(odd).lean is None


def test_attention_that_would_come_out_wrong_is_refused() -> None:
    with pytest.raises(ModelError, match="sliding window"):
        Target(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)))
