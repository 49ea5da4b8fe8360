"""The compiled decoder against the models' own forward, family by family."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
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

from agentspec.config import Dtype
from agentspec.engine.attention import Segment
from agentspec.engine.decoder import is_compilable
from agentspec.engine.kv import PageTable
from agentspec.engine.target import Target
from agentspec.errors import ModelError
from agentspec.kernels.cpu.dots import GROUP, can_quantise
from agentspec.kernels.cpu.quantised import rounded
from tests.engine.tiny_models import (
    DYNAMIC,
    LINEAR,
    LLAMA3,
    MODELS,
    SIZES,
    VOCABULARY,
    YARN,
    by_transformers,
    gemma2,
    gemma3,
    longrope,
    made,
    made_with,
)


def passes(target: Target) -> list[torch.Tensor]:
    """A prompt in two chunks beside another sequence's tree, then a tree of its own, with logits of all rows."""
    first, second = PageTable(target.shape), PageTable(target.shape)
    chunk = Segment(first, tuple(range(20)), tuple(range(20)), None)
    out = [target.forward([chunk], range(20))]
    first.commit(range(20))
    long = Segment(first, tuple(range(60)) * 2, tuple(range(120)), None)
    out.append(target.forward([long], [0, 60, 119]))
    first.commit(range(40))
    parents = (-1, 0, 0, 1, 3)
    tree = Segment(first, (5, 6, 7, 8, 9), (0, 1, 1, 2, 3), parents)
    other = Segment(second, (1, 2, 3), (0, 1, 2), None)
    out.append(target.forward([tree, other], [0, 1, 2, 3, 4, 7]))
    first.commit([0, 1, 3])
    out.append(target.forward([Segment(first, (11,), (0,), None)], [0]))
    out.append(target.forward([Segment(first, (11, 12), (0, 1), None)], []))
    return out


@pytest.mark.parametrize("name", MODELS)
def test_the_compiled_decoder_computes_what_the_model_computes(name: str) -> None:
    target = Target(made(name))
    assert target.decoder is not None
    own = passes(Target(made(name), compiled=False))
    for mine, expected in zip(passes(target), own, strict=True):
        assert mine.shape == expected.shape
        torch.testing.assert_close(mine, expected, atol=5e-5, rtol=1e-5)


def whole_numbers(values: torch.Tensor) -> torch.Tensor:
    """Rounded to 8 bits in groups along the last dimension, and back."""
    size = values.shape[-1]
    groups = torch.nn.functional.pad(values, (0, -size % GROUP)).reshape(*values.shape[:-1], -1, GROUP).numpy()
    numbers, scales = rounded(groups)
    return torch.from_numpy(numbers * scales[..., None]).flatten(-2)[..., :size].float()


class RoundedLinear(torch.nn.Linear):
    """Multiplies what is rounded, in floats."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(whole_numbers(x.detach()), self.weight, self.bias)


@pytest.mark.skipif(not can_quantise(), reason="this processor multiplies bytes no faster")
@pytest.mark.parametrize("name", MODELS)
def test_int8_computes_what_a_model_of_rounded_linears_computes(name: str) -> None:
    twin = made(name)
    with torch.no_grad():
        for module in twin.modules():
            if isinstance(module, torch.nn.Linear):
                module.__class__ = RoundedLinear
                module.weight.copy_(whole_numbers(module.weight))
            if isinstance(module, torch.nn.Embedding) and not twin.config.tie_word_embeddings:
                module.weight.copy_(whole_numbers(module.weight))
    target = Target(made(name), dtype=Dtype.INT8)
    assert target.dtype == Dtype.INT8
    tokens = torch.randint(0, VOCABULARY, (40,)).tolist()
    with torch.no_grad():
        expected = by_transformers(twin, tokens, RoundedLinear)
    logits = target.forward([Segment(PageTable(target.shape), tuple(tokens), tuple(range(40)), None)], range(40))
    plain = by_transformers(made(name), tokens)
    distance, rounding = (logits - expected).abs().mean(), (plain - expected).abs().mean()
    assert 0 < rounding < 0.3 * plain.std()
    assert distance < 0.6 * rounding  # one number that is rounded the other way moves all that follow


def test_int8_that_cannot_be_had_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu"))
    assert Target(odd, dtype=Dtype.INT8).dtype == Dtype.FLOAT32
    assert "not of llama models yet" in caplog.text
    monkeypatch.setattr("agentspec.engine.target.can_quantise", lambda: False)
    assert Target(made("qwen2"), dtype=Dtype.INT8).dtype == Dtype.FLOAT32
    assert "multiplies bytes no faster" in caplog.text


def test_what_the_compiled_decoder_does_not_know_runs_on_its_own_forward() -> None:
    odd = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu"))
    assert not is_compilable(odd)
    assert Target(odd).decoder is None
    partial = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters={**LINEAR, "partial_rotary_factor": 0.5}))
    assert not is_compilable(partial)
    exact = gemma3(hidden_activation="gelu")
    assert Target(exact).decoder is None
    narrow = LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 24}, head_dim=6))
    assert Target(narrow).decoder is None


WINDOWS: dict[str, Callable[[], Any]] = {
    "llama has none": lambda: made_with(LlamaConfig, LlamaForCausalLM, sliding_window=9, use_sliding_window=True),
    "llama by layer has none": lambda: made_with(
        LlamaConfig, LlamaForCausalLM, sliding_window=9, layer_types=["sliding_attention"] * 3
    ),
    "mistral": lambda: made_with(MistralConfig, MistralForCausalLM, sliding_window=9),
    "mistral cannot switch off": lambda: made_with(
        MistralConfig, MistralForCausalLM, sliding_window=9, use_sliding_window=False
    ),
    "qwen2 by layer": lambda: made_with(
        Qwen2Config, Qwen2ForCausalLM, sliding_window=9, use_sliding_window=True, max_window_layers=1
    ),
    "qwen2 switched off": lambda: made_with(Qwen2Config, Qwen2ForCausalLM, sliding_window=9, use_sliding_window=False),
    "qwen3 by layer": lambda: made_with(
        Qwen3Config,
        Qwen3ForCausalLM,
        head_dim=32,
        sliding_window=9,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "gemma 3": lambda: gemma3(sliding_window=9),
    "gemma 3 caps no scores": lambda: gemma3(sliding_window=9, attn_logit_softcapping=2.0),
    "gemma 2": lambda: gemma2(sliding_window=9),
    "gemma 2 without caps": lambda: gemma2(attn_logit_softcapping=None, final_logit_softcapping=None),
    "phi 3": lambda: made_with(Phi3Config, Phi3ForCausalLM, sliding_window=9),
    "smollm 3": lambda: made_with(
        SmolLM3Config, SmolLM3ForCausalLM, no_rope_layers=[1, 0, 1], use_sliding_window=False
    ),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
def test_every_family_sees_what_transformers_lets_it_see(name: str, compiled: bool) -> None:
    tokens = torch.randint(0, VOCABULARY, (100,)).tolist()
    expected = by_transformers(WINDOWS[name](), tokens)
    target = Target(WINDOWS[name](), compiled=compiled)
    table = PageTable(target.shape)
    first = target.forward([Segment(table, tuple(tokens[:80]), tuple(range(80)), None)], range(80))
    torch.testing.assert_close(first, expected[:80], atol=5e-5, rtol=1e-4)
    table.commit(range(80))
    tree = Segment(table, (tokens[80], 3, tokens[81], tokens[82]), (0, 1, 1, 2), (-1, 0, 0, 2))
    torch.testing.assert_close(target.forward([tree], [0, 2, 3]), expected[80:83], atol=5e-5, rtol=1e-4)
    table.commit([0, 2, 3])
    for at in range(83, 90):
        alone = target.forward([Segment(table, (tokens[at],), (0,), None)], [0])
        torch.testing.assert_close(alone[0], expected[at], atol=5e-5, rtol=1e-4)
        table.commit([0])


POSITIONS: dict[str, Callable[[], Any]] = {
    "linear": lambda: made_with(MistralConfig, MistralForCausalLM, sliding_window=None, rope_parameters=LINEAR),
    "llama 3": lambda: made_with(LlamaConfig, LlamaForCausalLM, rope_parameters=LLAMA3),
    "yarn": lambda: made_with(Qwen2Config, Qwen2ForCausalLM, rope_parameters=YARN),
    "dynamic": lambda: made_with(LlamaConfig, LlamaForCausalLM, rope_parameters=DYNAMIC),
    "longrope below its change": lambda: made_with(
        Phi3Config, Phi3ForCausalLM, max_position_embeddings=64, **longrope(32, 64)
    ),
    "partial": lambda: made_with(
        Phi3Config,
        Phi3ForCausalLM,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    ),
    "partial longrope": MODELS["phi 4 mini"],
    "by layer": MODELS["gemma 3"],
}


@pytest.mark.parametrize("name", POSITIONS)
def test_every_kind_of_positions_turns_as_in_transformers(name: str) -> None:
    target = Target(POSITIONS[name]())
    assert target.decoder is not None
    tokens = torch.randint(0, VOCABULARY, (target.window,)).tolist()
    expected = by_transformers(POSITIONS[name](), tokens)
    whole = Segment(PageTable(target.shape), tuple(tokens), tuple(range(target.window)), None)
    torch.testing.assert_close(target.forward([whole], range(target.window)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("compiled", [True, False])
def test_longrope_ends_where_it_would_turn_everything_anew(compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    def model() -> Any:
        return made_with(Phi3Config, Phi3ForCausalLM, **longrope(32, 48))

    target = Target(model(), compiled=compiled)
    assert target.window == 48
    assert "the window is 48 tokens and not 256" in caplog.text
    tokens = torch.randint(0, VOCABULARY, (49,)).tolist()
    expected = by_transformers(model(), tokens[:48])
    table = PageTable(target.shape)
    first = target.forward([Segment(table, tuple(tokens[:40]), tuple(range(40)), None)], range(40))
    table.commit(range(40))
    rest = target.forward([Segment(table, tuple(tokens[40:48]), tuple(range(8)), None)], range(8))
    torch.testing.assert_close(torch.cat([first, rest]), expected, atol=5e-5, rtol=1e-4)
    beyond = by_transformers(model(), tokens)
    assert (beyond[:48] - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("config", "model", "changes"),
    [
        (GptOssConfig, GptOssForCausalLM, {"num_local_experts": 2}),
        (BloomConfig, BloomForCausalLM, {}),
        (Llama4TextConfig, Llama4ForCausalLM, {"num_local_experts": 2}),
        (MambaConfig, MambaForCausalLM, {"num_attention_heads": None}),
    ],
)
def test_attention_that_would_come_out_wrong_is_refused(config: type, model: type, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"s_aux|let their attention be replaced|chunked_attention|no num_"):
        Target(made_with(config, model, **changes))


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(ModelError, match="sight of later tokens"):
        Target(gemma3(use_bidirectional_attention=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        {"num_attention_heads": 2, "num_key_value_heads": 4},
        {"num_hidden_layers": 0},
    ],
    ids=str,
)
def test_a_shape_that_is_not_whole_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="not whole"):
        Target(made_with(LlamaConfig, LlamaForCausalLM, head_dim=32, **changes))
