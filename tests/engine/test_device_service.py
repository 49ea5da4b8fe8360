"""The engine behind its async face on a device's target, by the kernels' twins on the CPU."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig, Config, EngineConfig, ModelConfig
from agentspec.engine.attention import NAME
from agentspec.engine.chat import Chat
from agentspec.engine.device_target import DeviceTarget
from agentspec.engine.parity import Parity, RecordedTurn, Way
from agentspec.engine.service import Engine
from agentspec.kernels.triton import backend
from agentspec.policies.cost import FixedCost
from agentspec.types import (
    Delta,
    GenerationRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
    Scope,
    SpeculationParams,
    Trajectory,
)

KV_BYTES = 2**24
OFF = SpeculationParams(enabled=False)


@pytest.fixture
def device_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The tiny chat model with heads that the kernels know."""
    monkeypatch.setattr(backend, "device_runs_triton", lambda device: False)
    models: Any = AutoModelForCausalLM
    sizes = AutoConfig.from_pretrained(tiny_model)
    sizes.head_dim = 64
    torch.manual_seed(7)
    target = DeviceTarget(models.from_config(sizes, attn_implementation=NAME), torch.device("cpu"), KV_BYTES)
    config = Config(ModelConfig(name=str(tiny_model)), EngineConfig(kv_bytes=KV_BYTES))
    return Engine(config, target, Chat.load(tiny_model), frozenset({256}), Histories(CacheConfig()))


async def generated(engine: Engine, **fields: Any) -> list[Delta]:
    prompt = engine.render([{"role": "user", "content": "abcabcabc"}], None)
    trajectory = Trajectory("t", Scope("default", "tiny"))
    return [delta async for delta in engine.generate(GenerationRequest(prompt, trajectory, 20, **fields))]


def tokens_of(deltas: list[Delta]) -> tuple[int, ...]:
    assert deltas[-1].report is not None
    return deltas[-1].report.token_ids


def test_requests_of_every_kind_say_the_same_with_drafts(device_engine: Engine) -> None:
    engine = device_engine
    grammar = Grammar(GrammarKind.REGEX, "(abc|abd){1,5}", "guided_regex")
    kinds: list[dict[str, Any]] = [
        {},
        {"sampling": SamplingParams(temperature=0.7, top_p=0.95, seed=5)},
        {"sampling": SamplingParams(frequency_penalty=0.3)},
        {"grammar": grammar},
        {"logprobs": 1, "prompt_logprobs": 1},
    ]

    async def scenario() -> None:
        engine.loop.cost = FixedCost()
        for fields in kinds:
            plain = tokens_of(await generated(engine, speculation=OFF, **fields))
            for _ in range(2):
                drafted = await generated(engine, **fields)
                assert tokens_of(drafted) == plain
        assert drafted[-1].report is not None
        assert drafted[-1].report.steps < len(plain) / 2
        told = [one for delta in drafted for one in delta.prompt_logprobs]
        assert len(told) == drafted[-1].report.prompt_tokens - 1
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_parity_compares_logits_of_a_device_on_the_host(device_engine: Engine) -> None:
    async def scenario() -> None:
        turns = [RecordedTurn("run", at, tuple(range(97, 97 + 10 + at))) for at in range(3)]
        made = await Parity(device_engine, 6, [3]).compare(turns, [Way("greedy", SamplingParams(), 3)])
        assert [(one.turns, one.identical_turns, one.holds) for one in made] == [(3, 3, True)]
        await device_engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
