"""The compiled decoder against the models' own forward, family by family, and against itself, bit by bit."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
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
from agentspec.engine.attention import NAME, Segment
from agentspec.engine.decoder import is_compilable
from agentspec.engine.kv import PageTable
from agentspec.engine.linear import FirstOfFused
from agentspec.engine.target import Target
from agentspec.errors import ModelError
from agentspec.kernels.cpu.dots import GROUP, can_quantise
from agentspec.kernels.cpu.quantised import rounded

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "attn_implementation": NAME,
}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama tied, biased, scaled": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=SCALED)
    ),
    "llama odd sizes": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "hidden_size": 44, "intermediate_size": 27, "vocab_size": 101}, head_dim=64)
    ),
    "llama 3 positions": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "llama many heads": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "hidden_size": 120, "num_attention_heads": 30, "num_key_value_heads": 1}, head_dim=32)
    ),
    "llama one head": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "num_attention_heads": 1, "num_key_value_heads": 1}, head_dim=256)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 96})),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "phi 3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0)),
    "smollm 3": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**SIZES, pad_token_id=0, no_rope_layers=[1, 0, 1], attention_bias=True, mlp_bias=True)
    ),
}


def made(name: str) -> Any:
    """A random model, the same every time, with biases and norms that are not the initial zeros and ones."""
    torch.manual_seed(3)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


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
    tokens = torch.randint(0, 61, (40,)).tolist()
    with torch.no_grad():
        expected = by_transformers(twin, tokens, RoundedLinear)
    logits = target.forward([Segment(PageTable(target.shape), tuple(tokens), tuple(range(40)), None)], range(40))
    plain = by_transformers(made(name), tokens)
    distance, rounding = (logits - expected).abs().mean(), (plain - expected).abs().mean()
    assert 0 < rounding < 0.3 * plain.std()
    assert distance < 0.2 * rounding


def test_int8_that_cannot_be_had_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu"))
    assert Target(odd, dtype=Dtype.INT8).dtype == Dtype.FLOAT32
    assert "not of llama models yet" in caplog.text
    monkeypatch.setattr("agentspec.engine.target.can_quantise", lambda: False)
    assert Target(made("qwen2"), dtype=Dtype.INT8).dtype == Dtype.FLOAT32
    assert "multiplies bytes no faster" in caplog.text


def test_a_model_with_a_window_computes_what_transformers_computes() -> None:
    torch.manual_seed(3)
    plain: Any = MistralForCausalLM(MistralConfig(**{**SIZES, "attn_implementation": "eager"}, sliding_window=37))
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=37))
    model.load_state_dict(plain.state_dict())
    target = Target(model)
    table = PageTable(target.shape)
    tokens = torch.randint(0, 61, (130,)).tolist()
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0]
    at_once = target.forward([Segment(table, tuple(tokens), tuple(range(130)), None)], range(130))
    torch.testing.assert_close(at_once, expected, atol=5e-5, rtol=1e-5)
    table.commit(range(90))
    for at in range(90, 130):
        alone = target.forward([Segment(table, (tokens[at],), (0,), None)], [0])
        assert torch.equal(alone[0], at_once[at])
        table.commit([0])


@pytest.fixture(scope="module", params=[Dtype.FLOAT32, Dtype.INT8])
def target(request: pytest.FixtureRequest) -> Target:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    made_target = Target(made("llama tied, biased, scaled"), dtype=request.param)
    assert made_target.dtype == request.param or not can_quantise()
    torch.set_num_threads(threads)
    return made_target


def plain_rows(target: Target, tokens: Sequence[int], cached: int) -> torch.Tensor:
    """Logits of every position from `cached` on, decoded token by token."""
    table = PageTable(target.shape)
    if cached:
        target.forward([Segment(table, tuple(tokens[:cached]), tuple(range(cached)), None)], [])
        table.commit(range(cached))
    rows = []
    for token in tokens[cached:]:
        rows.append(target.forward([Segment(table, (token,), (0,), None)], [0])[0])
        table.commit([0])
    return torch.stack(rows)


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Tokens, parents and depths of a random tree of up to 40 nodes."""
    size = draw(st.integers(1, 40))
    parents, depths = [-1], [0]
    for node in range(1, size):
        parents.append(draw(st.integers(max(0, node - 4), node - 1)))
        depths.append(depths[parents[-1]] + 1)
    tokens = tuple(draw(st.lists(st.integers(0, 60), min_size=size, max_size=size)))
    return tokens, tuple(parents), tuple(depths)


@settings(max_examples=30, deadline=None)
@given(tree=trees(), cached=st.integers(0, 90), beside=st.lists(st.integers(1, 30), max_size=2), data=st.data())
def test_every_node_has_the_bits_of_plain_decoding(
    target: Target,
    tree: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    cached: int,
    beside: list[int],
    data: st.DataObject,
) -> None:
    """Whatever tree a node is in, whatever other sequences are in the pass, however the prompt was cut in chunks."""
    tokens, parents, depths = tree
    prompt = [(7 * i + cached) % 61 for i in range(cached)]
    table = PageTable(target.shape)
    while table.length < cached:
        size = data.draw(st.integers(1, cached - table.length))
        chunk = tuple(prompt[table.length : table.length + size])
        target.forward([Segment(table, chunk, tuple(range(size)), None)], [])
        table.commit(range(size))
    others = [Segment(PageTable(target.shape), (5,) * size, tuple(range(size)), None) for size in beside]
    logits = target.forward([Segment(table, tokens, depths, parents), *others], range(len(tokens)))
    node = data.draw(st.integers(0, len(tokens) - 1))
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    line.reverse()
    expected = plain_rows(target, [*prompt, *[tokens[at] for at in line]], cached)
    assert torch.equal(logits[line], expected)
    table.commit(line)
    after = target.forward([Segment(table, (3,), (0,), None)], [0])
    assert torch.equal(after[0], plain_rows(target, [*prompt, *[tokens[at] for at in line], 3], cached)[-1])


@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (30, 1)])
def test_rows_keep_their_bits_across_the_chunks_of_long_contexts(heads: tuple[int, int]) -> None:
    torch.manual_seed(5)
    sizes = {**SIZES, "hidden_size": 180, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    long = Target(LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 2048}, head_dim=32)))
    tokens = torch.randint(0, 61, (1200,)).tolist()
    table = PageTable(long.shape)
    at_once = long.forward([Segment(table, tuple(tokens), tuple(range(1200)), None)], range(1200))
    cut = PageTable(long.shape)
    for stop in (513, 1025, 1190):
        first = cut.length
        chunk = Segment(cut, tuple(tokens[first:stop]), tuple(range(stop - first)), None)
        assert torch.equal(long.forward([chunk], range(stop - first)), at_once[first:stop])
        cut.commit(range(stop - first))
    for position in (1, 500, 511, 512, 513, 600, 1023, 1024, 1100):
        cut.length = position
        alone = long.forward([Segment(cut, (tokens[position],), (0,), None)], [0])
        assert torch.equal(alone[0], at_once[position])
        tree = Segment(cut, (tokens[position], 3, tokens[position + 1]), (0, 1, 1), (-1, 0, 0))
        assert torch.equal(long.forward([tree], [2])[0], at_once[position + 1])
        restored = Segment(cut, tuple(tokens[position : position + 3]), (0, 1, 2), None)
        long.forward([restored], [])


@pytest.mark.parametrize(
    "segment",
    [
        {"tokens": (61,)},
        {"tokens": (-1,)},
        {"tokens": (), "depths": ()},
        {"depths": (256,)},
        {"depths": (-1,)},
        {"tokens": (1, 2), "depths": (0, 1), "parents": (-1, 1)},
        {"tokens": (1, 2), "depths": (0, 1), "parents": (-1, -2)},
        {"tokens": (1, 2), "depths": (0, 1), "parents": (-1,)},
    ],
    ids=str,
)
def test_what_is_out_of_range_fails_before_anything_is_computed(target: Target, segment: dict[str, Any]) -> None:
    good: dict[str, Any] = {"tokens": (1,), "depths": (0,), "parents": None}
    with pytest.raises(IndexError):
        target.forward([Segment(PageTable(target.shape), **{**good, **segment})], [])
    with pytest.raises(IndexError):
        target.forward([Segment(PageTable(target.shape), **good)], [1])


def test_threads_end_with_their_decoder() -> None:
    gc.collect()
    before = threading.active_count()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    mine = Target(made("qwen2"))
    torch.set_num_threads(threads)
    passes(mine)
    assert threading.active_count() == before + 2
    del mine
    gc.collect()
    assert threading.active_count() == before


def test_a_process_with_a_decoder_ends_in_peace(tiny_model: Path) -> None:
    program = f"""
import torch
torch.set_num_threads(3)
from pathlib import Path
from agentspec.engine.profile import filled_table, pass_seconds
from agentspec.engine.target import Target
target = Target.load(Path({str(tiny_model)!r}))
pass_seconds(target, filled_table(target, 5), 8, 2)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_the_compiled_decoder_does_not_know_runs_on_its_own_forward() -> None:
    odd = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu"))
    assert not is_compilable(odd)
    assert Target(odd).decoder is None
    partial = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters={**SCALED, "partial_rotary_factor": 0.5}))
    assert not is_compilable(partial)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert not is_compilable(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=dynamic)))
    narrow = LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 24}, head_dim=6))
    assert Target(narrow).decoder is None


def made_with(config: type, model: type, **changes: Any) -> Any:
    torch.manual_seed(4)
    return model(config(**{**SIZES, **changes}))


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
    "gemma 3": lambda: made_with(
        Gemma3TextConfig, Gemma3ForCausalLM, head_dim=32, sliding_window=9, sliding_window_pattern=2
    ),
    "gemma 2 with soft caps": lambda: made_with(
        Gemma2Config, Gemma2ForCausalLM, head_dim=32, sliding_window=9, attn_logit_softcapping=2.0
    ),
    "phi 3": lambda: made_with(Phi3Config, Phi3ForCausalLM, sliding_window=9, pad_token_id=0),
    "smollm 3": lambda: made_with(
        SmolLM3Config, SmolLM3ForCausalLM, pad_token_id=0, no_rope_layers=[1, 0, 1], use_sliding_window=False
    ),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
def test_every_family_sees_what_transformers_lets_it_see(name: str, compiled: bool) -> None:
    tokens = torch.randint(0, 61, (100,)).tolist()
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


@pytest.mark.parametrize(
    ("config", "model", "changes"),
    [
        (GptOssConfig, GptOssForCausalLM, {"num_local_experts": 2}),
        (BloomConfig, BloomForCausalLM, {}),
        (Llama4TextConfig, Llama4ForCausalLM, {"pad_token_id": 0, "num_local_experts": 2}),
        (MambaConfig, MambaForCausalLM, {"num_attention_heads": None}),
    ],
)
def test_attention_that_would_come_out_wrong_is_refused(config: type, model: type, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"s_aux|let their attention be replaced|chunked_attention|no num_"):
        Target(made_with(config, model, **changes))


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


def test_a_bias_of_one_projection_only_is_kept() -> None:
    torch.manual_seed(2)
    first, second = torch.nn.Linear(8, 4), torch.nn.Linear(8, 6, bias=False)
    x = torch.randn(3, 8)
    fused = FirstOfFused([first, second])
    torch.testing.assert_close(fused(x), first(x))
    torch.testing.assert_close(fused.rest[0](x), second(x))


@pytest.mark.parametrize("broken", ["no number", "zero row"])
def test_numbers_that_are_none_end_no_thread(broken: str) -> None:
    """An exception in one thread's compiled code would leave the others waiting for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    model = made_with(MistralConfig, MistralForCausalLM, sliding_window=9, rms_norm_eps=0.0)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan") if broken == "no number" else 0.0
    mine = Target(model)
    torch.set_num_threads(threads)
    broken_run, other = (Segment(PageTable(mine.shape), tokens, (0, 1), None) for tokens in ((1, 5), (1, 2)))
    logits = mine.forward([broken_run, other], [1, 3])
    assert logits[0].isnan().all()
    assert not logits[1].isnan().any()


def test_a_forked_process_is_told_and_holds_nobody_up(tiny_model: Path) -> None:
    program = f"""
import os, signal, sys, time, torch
torch.set_num_threads(2)
from pathlib import Path
from agentspec.engine.attention import Segment
from agentspec.engine.kv import PageTable
from agentspec.engine.linear import FirstOfFused
from agentspec.engine.target import Target
target = Target.load(Path({str(tiny_model)!r}))
def compute():
    return target.forward([Segment(PageTable(target.shape), (1,), (0,), None)], [0])
compute()
child = os.fork()
if child == 0:
    try:
        compute()
    except RuntimeError as error:
        os.write(1, str(error).encode())
    os.read(0, 1)
    os._exit(0)
compute()
del target
os.close(0)
print("free", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], stdin=PIPE, stdout=PIPE, text=True)
    assert process.wait(timeout=60) == 0
    out, _ = process.communicate("x", timeout=60)
    assert "only in the process that started it" in out
    assert "free" in out
