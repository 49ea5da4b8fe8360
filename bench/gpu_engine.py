"""The worker's own step loop on a device: a small random model, greedy and seeded, with drafts and without."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from agentspec.config import EngineConfig
from agentspec.engine.attention import NAME, Segment
from agentspec.engine.commit import Completion
from agentspec.engine.device_target import DeviceTarget
from agentspec.engine.job import Job
from agentspec.engine.kv import PageTable
from agentspec.engine.loop import StepLoop
from agentspec.engine.text import TextStream
from agentspec.kernels.triton.blocks import BlockTable
from agentspec.policies.cost import FixedCost
from agentspec.types import (
    Delta,
    Drafter,
    DraftTree,
    GenerationRequest,
    Outcome,
    Report,
    SamplingParams,
    Scope,
    SpeculationParams,
    Trajectory,
)

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}
WAYS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=5),
    "biased": SamplingParams(logit_bias=((1, 0.5),)),
}
"""The last is one whose walk the host has to make."""

AHEAD = 8
"""Tokens that a drafter looks ahead."""

DECODED = 256
"""Tokens of a timed request."""


@dataclass
class Knowing:
    """Drafts the next tokens of an answer, each behind a wrong sibling: right, or all of them wrong."""

    prompt: Sequence[int]
    answer: Sequence[int]
    vocabulary: int
    right: bool
    said: list[int] = field(default_factory=list)

    def propose(self, budget: int) -> DraftTree:
        """As `Drafter.propose`."""
        token, parent, depth, above = [[*self.prompt, *self.said][-1]], [-1], [0], 0
        for step in self.answer[len(self.said) : len(self.said) + min(AHEAD, budget // 2)]:
            for shift in (1, 0 if self.right else 2):
                token.append((step + shift) % self.vocabulary)
                parent.append(above)
                depth.append(depth[above] + 1)
            above = len(token) - 1
        size = len(token)
        logp = (0.0, *[-0.01] * (size - 1))
        cum = tuple(-0.01 * level for level in depth)
        return DraftTree(tuple(token), tuple(parent), tuple(depth), logp, cum, (0, *[1] * (size - 1)))

    def observe(self, outcome: Outcome) -> None:
        """As `Drafter.observe`."""
        self.said.extend(outcome.tokens)


def make_target(
    sizes: dict[str, Any], device: str, dtype: torch.dtype, blocks: BlockTable | None = None, graphs: bool = True
) -> DeviceTarget:
    """The same random decoder at every call."""
    torch.manual_seed(11)
    models: Any = AutoModelForCausalLM
    model = models.from_config(LlamaConfig(**sizes, initializer_range=0.1), attn_implementation=NAME, dtype=dtype)
    return DeviceTarget(model, torch.device(device), 2**30 if sizes is SIZES else 2**22, blocks=blocks, graphs=graphs)


@dataclass(slots=True)
class Said:
    """What a batch of requests said."""

    reports: list[Report]
    steps: int

    @property
    def answers(self) -> list[tuple[int, ...]]:
        """The tokens of each."""
        return [report.token_ids for report in self.reports]

    @property
    def seconds(self) -> float:
        """Of decoding: from the first tokens on."""
        return max(report.decode_s for report in self.reports)


def generate(
    target: DeviceTarget,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: SamplingParams,
    answers: Sequence[Sequence[int]] | None = None,
    *,
    right: bool = True,
) -> Said:
    """`count` tokens after each prompt, all in one batch, with drafts where the answers are given."""
    pages = (target.shape.positions * target.shape.token_bytes) // 2
    loop = StepLoop(target, EngineConfig(max_running=len(prompts), kv_bytes=pages), FixedCost())
    results: list[list[Delta]] = []
    errors: list[Exception] = []
    for number, prompt in enumerate(prompts):
        drafter = Knowing(prompt, answers[number], target.vocabulary, right) if answers else None
        results.append([])
        loop.add(job_of(number, prompt, count, sampling, drafter, results[-1], errors, target.vocabulary))
    steps = 0
    while not loop.idle:
        loop.step()
        steps += 1
    if errors:
        raise errors[0]
    return Said([report for report in (deltas[-1].report for deltas in results) if report], steps)


def job_of(
    number: int,
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParams,
    drafter: Drafter | None,
    deltas: list[Delta],
    errors: list[Exception],
    vocabulary: int,
) -> Job:
    """A request for a step loop; no token ends it."""
    trajectory = Trajectory(str(number), Scope("check", "check"))
    request = GenerationRequest(tuple(prompt), trajectory, count, sampling, SpeculationParams(max_draft_tokens=64))
    completion = Completion(TextStream([b""] * vocabulary), count, frozenset())
    return Job(request, completion, drafter, deltas.append, errors.append, list(prompt))


def prompts_of(vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts."""
    noise = torch.Generator().manual_seed(3)
    return [torch.randint(vocabulary, (length,), generator=noise).tolist() for length in lengths]


def gap_after(target: DeviceTarget, tokens: Sequence[int]) -> float:
    """Distance of the two best logits after some tokens."""
    segment = Segment(PageTable(target.shape), tuple(tokens), tuple(range(len(tokens))), None)
    best = target.forward([segment], [len(tokens) - 1])[0].topk(2).values
    return float(best[0] - best[1])


def engine_checks(device: str, small: bool, graphs: bool) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """For each way of sampling and kind of draft: how many tokens differ from decoding one by one without drafts; the
    steps; and how near the two best logits are where the first of these tokens differ. Small: greedy alone."""
    target = make_target(TINY if small else SIZES, device, torch.float32, graphs=graphs)
    count = 4 if small else 128
    prompts = prompts_of(target.vocabulary, (3,) if small else (1, 7, 40, 300, 65, 64, 63, 128))
    for name, sampling in list(WAYS.items())[: 1 if small else None]:
        alone = [generate(target, [prompt], count, sampling) for prompt in prompts]
        answers = [answer for said in alone for answer in said.answers]
        for kind in ("right drafts", "wrong drafts"):
            made = generate(target, prompts, count, sampling, answers, right=kind == "right drafts")
            figures: dict[str, float] = {"steps": made.steps, "steps_plain": max(said.steps for said in alone)}
            wrong = 0
            for prompt, mine, its in zip(prompts, made.answers, answers, strict=True):
                places = [at for at, (one, other) in enumerate(zip(mine, its, strict=True)) if one != other]
                wrong += len(places)
                if places:
                    gap = gap_after(target, [*prompt, *its[: places[0]]])
                    figures["smallest_gap"] = min(gap, figures.get("smallest_gap", gap))
            yield f"{name} engine", kind, wrong, figures


def engine_timings(blocks: BlockTable, graphs: bool) -> list[dict[str, Any]]:
    """Decoding of 1 and 8 requests in bfloat16: tokens a second without drafts, and with right ones, with CUDA graphs
    and without."""
    rows: list[dict[str, Any]] = []
    for recorded in (True, False) if graphs else (False,):
        target = make_target(SIZES, "cuda", torch.bfloat16, blocks, recorded)
        for at_once in (1, 8):
            prompts = prompts_of(target.vocabulary, [200] * at_once)
            plain = generate(target, prompts, DECODED, SamplingParams())
            generate(target, prompts, DECODED, SamplingParams(), plain.answers)
            again = generate(target, prompts, DECODED, SamplingParams())
            drafted = generate(target, prompts, DECODED, SamplingParams(), plain.answers)
            row: dict[str, Any] = {"graphs": target.graphs.enabled, "at_once": at_once}
            for name, said in (("plain", again), ("drafted", drafted)):
                row[f"{name}_steps"] = said.steps
                row[f"{name}_ms_per_step"] = said.seconds * 1e3 / (said.steps - 1)
                row[f"{name}_tokens_per_s"] = sum(report.decode_tokens for report in said.reports) / said.seconds
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            rows.append(row)
    return rows
