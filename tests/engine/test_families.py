"""Every family of models: whatever is drafted, in any batch, the output is that of plain decoding alone."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
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

from agentspec.config import EngineConfig
from agentspec.engine.attention import NAME
from agentspec.engine.loop import StepLoop
from agentspec.engine.target import Target
from agentspec.policies.cost import FixedCost
from agentspec.types import DraftTree, Outcome, SamplingParams, SpeculationParams

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 280,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "attn_implementation": NAME,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
LOCAL = {"sliding_window": 19, "sliding_window_pattern": 2}


def phi4() -> Any:
    """With angles for three quarters of a head."""
    turned = SIZES["head_dim"] * 3 // 8
    long = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + i / 8 for i in range(turned)],
        "long_factor": [2.0 + i for i in range(turned)],
    }
    own = {"hidden_size": 4 * SIZES["head_dim"], "original_max_position_embeddings": 128, "rope_parameters": long}
    return Phi3ForCausalLM(Phi3Config(**{**SIZES, **own}))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama 3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "qwen 2.5": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen 3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=19)),
    "gemma 2": lambda: Gemma2ForCausalLM(Gemma2Config(**{**SIZES, "sliding_window": 19})),
    "gemma 3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, **LOCAL})),
    "smollm 3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SIZES, no_rope_layers=[1, 0])),
    "phi 3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "phi 4": phi4,
}
NODES = 64
WAYS = {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=3)}
KINDS = ("right", "wrong", "random", "raising")
NEW = 14


@cache
def target_of(family: str) -> Target:
    torch.manual_seed(5)
    return Target(FAMILIES[family]())


@dataclass
class Bushy:
    """Proposes a tree of up to `NODES` nodes around the answer, which it follows, avoids, or meets by chance."""

    answer: Sequence[int]
    kind: str
    root: int
    dice: random.Random
    seen: int = 0

    def propose(self, budget: int) -> DraftTree:
        if self.kind == "raising" and self.seen > 3:
            raise RuntimeError("a drafter's own fault")
        token, parent, depth, spine = [self.root], [-1], [0], [True]
        known = set()
        for _ in range(self.dice.randint(1, min(budget, NODES))):
            above = self.dice.randrange(len(token))
            following = self.seen + depth[above]
            right = self.answer[following] if following < len(self.answer) and spine[above] else None
            chosen = self.dice.randrange(256)
            if self.kind != "wrong" and right is not None and (self.kind == "right" or self.dice.random() < 0.4):
                chosen = right
            if (above, chosen) in known or (self.kind == "wrong" and chosen == right):
                continue
            known.add((above, chosen))
            token.append(chosen)
            parent.append(above)
            depth.append(depth[above] + 1)
            spine.append(spine[above] and chosen == right)
        logp = (0.0, *[-0.01] * (len(token) - 1))
        cum = tuple(-0.01 * level for level in depth)
        return DraftTree(tuple(token), tuple(parent), tuple(depth), logp, cum, (0, *[1] * (len(token) - 1)))

    def observe(self, outcome: Outcome) -> None:
        self.seen += len(outcome.tokens)
        self.root = outcome.tokens[-1]


def prompts_of(seed: int, count: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(256) for _ in range(dice.randint(1, 60))] for _ in range(count)]


def plain(harness: Any, kit: Any, target: Target, prompt: list[int], sampling: SamplingParams) -> tuple[int, ...]:
    loop = StepLoop(target, EngineConfig(), FixedCost())
    job, result = harness.job(prompt, NEW, sampling=sampling)
    loop.add(job)
    kit.drain(loop)
    tokens: tuple[int, ...] = result.tokens
    return tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_join_and_leave_say_what_each_says_alone(harness: Any, kit: Any, family: str, way: str) -> None:
    target, sampling = target_of(family), WAYS[way]
    prompts = prompts_of(len(family), 8)
    alone = [plain(harness, kit, target, prompt, sampling) for prompt in prompts]
    for together in (1, 3, 8):
        dice = random.Random(together)
        config = EngineConfig(max_running=together, prefill_chunk=16, max_draft_tokens=NODES)
        loop = StepLoop(target, config, FixedCost())
        results = []
        for number, (prompt, answer) in enumerate(zip(prompts, alone, strict=True)):
            drafter = Bushy(answer, KINDS[number % len(KINDS)], prompt[-1], dice)
            job, result = harness.job(prompt, NEW, drafter, sampling, trajectory=str(number))
            job.request = replace(job.request, speculation=SpeculationParams(max_draft_tokens=NODES))
            loop.add(job)
            results.append(result)
            leaver, _ = harness.job(prompt[:5], 30, sampling=sampling, trajectory="leaver")
            loop.add(leaver)
            loop.step()
            leaver.cancelled = dice.random() < 0.8
        kit.drain(loop)
        assert [result.tokens for result in results] == alone
        assert loop.pool.held == 0
        assert sum(result.deltas[-1].report.accepted_total for result in results) > 0


def test_the_trees_grow_as_large_as_they_may() -> None:
    drafter = Bushy(list(range(40)), "random", 0, random.Random(1))
    assert max(len(drafter.propose(NODES)) for _ in range(200)) > 60
