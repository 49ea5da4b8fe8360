"""What 8 bits gain and cost: the perplexity is the model's own, and nothing is compared with itself."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from agentspec.config import Config, ModelConfig
from agentspec.engine import target as target_module
from agentspec.engine.precision import measure, negative_log_likelihood, pieces, print_report
from agentspec.engine.wheels import silent
from agentspec.errors import ModelError
from agentspec.kernels.cpu.dots import can_quantise

needs_int8 = pytest.mark.skipif(not can_quantise(), reason="this processor has no products of 8-bit numbers")


def config_of(folder: Path) -> Config:
    return replace(Config(), model=ModelConfig(name=str(folder), threads=1))


@pytest.mark.parametrize("length", [2, 64, 65, 66, 150])
def test_likelihood_is_that_of_transformers(harness: Any, tiny_model: Path, length: int) -> None:
    tokens = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length))
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        loss = float(model(tokens, labels=tokens).loss) * (length - 1)
    assert negative_log_likelihood(harness.target, tokens[0].tolist()) == pytest.approx(loss, rel=1e-4)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=5),
    st.integers(1, 200),
    st.integers(2, 30),
)
def test_pieces_are_prefixes_of_the_conversations_cut(texts: list[list[int]], tokens: int, longest: int) -> None:
    made = list(pieces(texts, tokens, longest))
    assert all(2 <= len(piece) <= longest for piece in made)
    assert sum(map(len, made)) <= max(tokens, 2 * len(texts))
    if texts and tokens >= sum(map(len, texts)) * len(texts):
        lost = sum(map(len, texts)) - sum(map(len, made))
        assert lost <= len(texts), "at most a last single token of each is left out"


@needs_int8
def test_both_ways_are_measured(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversations = [[1 + i % 200 for i in range(300)], [7, 8, 9] * 30]
    report = measure(config_of(tiny_model), lambda _: conversations, tokens=400, rounds=2, progress=silent)
    assert report.float32.perplexity != report.int8.perplexity
    ratio = report.int8.perplexity / report.float32.perplexity
    assert math.isclose(ratio - 1, report.perplexity_increase, abs_tol=1e-4)
    assert report.perplexity_tokens == 200 + 90 - 2
    assert report.int8.weight_bytes < 0.7 * report.float32.weight_bytes, "the weights are held once"
    assert report.int8_over_one[0] == 1
    print_report(report, as_json=True)
    assert json.loads(capsys.readouterr().out)["nodes"] == [1, 8, 16]
    print_report(report, as_json=False)
    assert "perplexity" in capsys.readouterr().out


def test_without_8_bit_numbers_it_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "can_quantise", lambda: False)
    with pytest.raises(ModelError, match="no 8-bit numbers"):
        measure(config_of(tiny_model), lambda _: [[1, 2]], tokens=9, rounds=1, progress=silent)


@needs_int8
def test_texts_without_tokens_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="no tokens to predict"):
        measure(config_of(tiny_model), lambda _: [[1], []], tokens=9, rounds=1, progress=silent)
