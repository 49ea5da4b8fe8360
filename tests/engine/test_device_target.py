"""The target on a device: what it computes is what the CPU's computes, in buffers of any size and whoever walks."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentspec.config import EngineConfig
from agentspec.engine.attention import Segment
from agentspec.engine.device_inputs import Inputs, exact_extent, rounded_extent
from agentspec.engine.device_target import DeviceTarget
from agentspec.engine.kv import PageTable
from agentspec.engine.loop import StepLoop
from agentspec.engine.sampling import choose
from agentspec.engine.target import Target
from agentspec.engine.verify import Draw, Walk, walk
from agentspec.errors import InternalError, KernelError, ModelError
from agentspec.kernels.cpu.attend import PAGE
from agentspec.kernels.triton import backend
from agentspec.policies.cost import FixedCost
from agentspec.types import DraftTree, SamplingParams, SpeculationParams
from tests.engine.test_families import FAMILIES, KINDS, NEW, NODES, SIZES, WAYS, Bushy, prompts_of

KV_BYTES = 2**25
HEADS = {"head_dim": 64}
"""The kernels for devices know no smaller ones."""

QUICK = [("gemma 3", "greedy", (3,)), ("qwen 3", "seeded", (4,))]
SLOW = [pytest.param(family, way, (1, 3, 8), marks=pytest.mark.slow) for family in FAMILIES for way in WAYS]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels' twins on the CPU, or the kernels on a GPU."""
    name = str(request.param)
    if name == "cuda" and (not torch.cuda.is_available() or backend.interpreting()):
        pytest.skip("no GPU, or TRITON_INTERPRET is not 0")
    if name == "cpu":
        monkeypatch.setattr(backend, "device_runs_triton", lambda device: False)
    yield name


def model_of(family: str, **sizes: Any) -> Any:
    """The family's random model with heads that the kernels know."""
    torch.manual_seed(5)
    with patch.dict(SIZES, {**HEADS, **sizes}):
        return FAMILIES[family]()


@cache
def target_of(family: str, device: str) -> DeviceTarget:
    return DeviceTarget(model_of(family), torch.device(device), KV_BYTES)


@cache
def cpu_target_of(family: str) -> Target:
    return Target(model_of(family), compiled=False)


def loop_on(target: DeviceTarget, **config: Any) -> StepLoop:
    return StepLoop(target, EngineConfig(**{"kv_bytes": KV_BYTES // 4, **config}), FixedCost())


def answered(kit: Any, loop: StepLoop, made: tuple[Any, Any]) -> tuple[int, ...]:
    """What one job says on a loop."""
    job, result = made
    loop.add(job)
    kit.drain(loop)
    assert result.errors == []
    tokens: tuple[int, ...] = result.tokens
    return tokens


def random_segment(target: Any, dice: random.Random, cached: int, nodes: int, *, chunk: bool = False) -> Segment:
    """Rows below `cached` computed positions: a random tree, or a chunk."""
    table = PageTable(target.shape)
    if cached:
        tokens = tuple(dice.randrange(256) for _ in range(cached))
        target.forward([Segment(table, tokens, tuple(range(cached)), None)], [])
        table.commit(range(cached))
    parents = [-1, *(dice.randrange(max(0, node - 4), node) for node in range(1, nodes))]
    depths = [0]
    for node in range(1, nodes):
        depths.append(node if chunk else depths[parents[node]] + 1)
    own = tuple(dice.sample(range(256), nodes))
    return Segment(table, own, tuple(depths), None if chunk or nodes == 1 else tuple(parents))


Rows = Sequence[tuple[int, int, bool]]
"""Cached positions, rows, whether they are a chunk."""


def logits_of(target: Any, rows: Rows, *, together: bool = True) -> Tensor:
    """Logits of all rows, in one pass or one pass each."""
    dice = random.Random(9)
    segments = [random_segment(target, dice, cached, size, chunk=chunk) for cached, size, chunk in rows]
    batches = [segments] if together else [[segment] for segment in segments]
    parts = [target.forward(some, range(sum(len(one.tokens) for one in some))).clone() for some in batches]
    return torch.cat(parts).cpu()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_cpu_target(family: str, device: str) -> None:
    target = target_of(family, device)
    for rows in ([(0, 1, False)], [(30, 9, False), (70, 3, False), (5, 1, False)], [(20, 30, True), (64, 7, False)]):
        torch.testing.assert_close(logits_of(target, rows), logits_of(cpu_target_of(family), rows), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "sizes",
    [
        (1,),
        (2,),
        (3,),
        (1, 1),
        (1, 2),
        (2, 2),
        (1, 1, 1),
        (2, 2, 1),
        (3, 3, 3),
        (1, 1, 1, 1, 1),
        (31,),
        (32,),
        (33, 31),
    ],
)
def test_padding_changes_nothing_at_the_edges_of_the_buffers(sizes: tuple[int, ...], device: str) -> None:
    target = target_of("mistral", device)
    rows = [(PAGE * at + at - (at > 0), size, False) for at, size in enumerate(sizes)]
    alone = logits_of(target, rows, together=False)
    torch.testing.assert_close(logits_of(target, rows), alone, rtol=0, atol=1e-4)


def test_passes_of_like_sizes_share_buffers_whatever_lay_in_them(device: str) -> None:
    target = DeviceTarget(model_of("llama 3"), torch.device(device), KV_BYTES)
    few, many = [(40, 5, False)], [(3, 4, False), (90, 3, False), (1, 1, False)]
    expected = logits_of(target, few), logits_of(target, many)
    kept = dict(target.passes)
    extents = [(extent.sequences, extent.rows, extent.most_nodes, extent.positions) for extent in kept]
    assert extents == [(1, 1, 1, 1024), (1, 8, 8, 1024), (4, 8, 8, 1024)]
    assert torch.equal(logits_of(target, few), expected[0])
    assert torch.equal(logits_of(target, many), expected[1])
    logits_of(target, [(8, 6, False)])
    logits_of(target, [(8, 5, True)])
    assert target.passes == kept


def test_the_room_of_a_pass_is_the_next_power_of_two() -> None:
    table = PageTable(cpu_target_of("mistral").shape)
    for nodes, length, room in ((1, 0, (1, 1, 1, 1024)), (5, 1019, (1, 8, 8, 1024)), (5, 1020, (1, 8, 8, 2048))):
        table.length = length
        segment = Segment(table, (1,) * nodes, tuple(range(nodes)), tuple(range(-1, nodes - 1)))
        extent = rounded_extent(exact_extent([segment]))
        assert (extent.sequences, extent.rows, extent.most_rows, extent.positions) == room
    many = rounded_extent(exact_extent([Segment(table, (1,) * 100, tuple(range(100)), tuple(range(-1, 99)))] * 5))
    assert (many.sequences, many.rows, many.most_rows, many.words) == (8, 512, 256, 8)


@pytest.mark.parametrize("way", ["greedy", "seeded", "filtered", "bare"])
def test_the_target_walks_as_the_host_does(way: str, device: str) -> None:
    target = target_of("llama 3", device)
    ways = {
        **WAYS,
        "filtered": SamplingParams(temperature=1.3, top_p=0.8, top_k=40, min_p=0.02, seed=8),
        "bare": SamplingParams(temperature=1.0, seed=2),
    }
    depths_seen = 0
    for seed in range(6):
        dice = random.Random(seed)
        segments = [random_segment(target, dice, 11 * at, dice.randint(1, 20)) for at in range(3)]
        segments.append(random_segment(target, dice, 4, 6, chunk=True))
        segments[1:2] = [grown(target, segments[1], ways[way])]
        draws = [Draw(replace(ways[way], seed=at), 5 * at) for at in range(4)]
        keep = [*range(sum(len(segment.tokens) for segment in segments[:3]))]
        keep.append(keep[-1] + len(segments[3].tokens))
        verified = target.verify(segments, keep, draws)
        expected = host_walks(segments, verified.logits.cpu(), draws)
        assert list(verified.walks) == expected
        depths_seen += sum(len(made.path) - 1 for made in expected)
    assert depths_seen >= 6


def grown(target: DeviceTarget, segment: Segment, sampling: SamplingParams) -> Segment:
    """The segment with the target's own choices after its root, four deep, each beside a wrong one."""
    root, table = segment.tokens[0], segment.table
    tokens, parents, depths = [root], [-1], [0]
    above = 0
    for depth in range(1, 5):
        made = Segment(table, tuple(tokens), tuple(depths), tuple(parents))
        row = target.forward([made], range(len(tokens)))[above].cpu()
        right = choose(row, replace(sampling, seed=1), 5 + depth - 1)
        tokens += [(right + 1) % 256, right]
        parents += [above, above]
        depths += [depth, depth]
        above = len(tokens) - 1
    return Segment(table, tuple(tokens), tuple(depths), tuple(parents))


def host_walks(segments: Sequence[Segment], logits: Tensor, draws: Sequence[Draw]) -> list[Walk]:
    """By `verify.walk` and `sampling.choose`."""
    walks, start = [], 0
    for segment, draw in zip(segments, draws, strict=True):
        chunk = segment.parents is None and len(segment.tokens) > 1
        tree = DraftTree.root(segment.tokens[-1])
        if not chunk:
            zeros = (0.0,) * len(segment.tokens)
            tree = DraftTree(segment.tokens, segment.parents or (-1,), segment.depths, zeros, zeros, (0,) * len(zeros))
        own = logits[start : start + len(tree)]
        start += len(tree)
        walks.append(walk(tree, chooser(own, draw)))
    return walks


def chooser(logits: Tensor, draw: Draw) -> Callable[[int, int], int]:
    return lambda node, depth: choose(logits[node], draw.sampling, draw.position + depth)


@pytest.mark.parametrize(("family", "way", "at_once"), [*QUICK, *SLOW])
def test_requests_that_join_and_leave_say_what_each_says_alone(
    harness: Any, kit: Any, family: str, way: str, at_once: tuple[int, ...], device: str
) -> None:
    target, sampling = target_of(family, device), WAYS[way]
    prompts = prompts_of(len(family), max(at_once))
    alone = [answered(kit, loop_on(target), harness.job(prompt, NEW, sampling=sampling)) for prompt in prompts]
    for together in at_once:
        dice = random.Random(together)
        loop = loop_on(target, max_running=together, prefill_chunk=16, max_draft_tokens=NODES)
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


def test_requests_that_the_host_walks_for_say_the_same_beside_others(harness: Any, kit: Any, device: str) -> None:
    target = target_of("llama 3", device)
    prompts = prompts_of(4, 3)
    biased = SamplingParams(temperature=0.8, seed=4, repetition_penalty=1.2, logit_bias=((7, 2.0),))
    ways = [SamplingParams(), biased, SamplingParams()]

    def jobs(loop: StepLoop, answers: Sequence[Sequence[int]] | None) -> list[Any]:
        results = []
        for at, (prompt, sampling) in enumerate(zip(prompts, ways, strict=True)):
            drafter = kit.Scripted(prompt, answers[at], "tree") if answers else None
            job, result = harness.job(prompt, NEW, drafter, sampling, trajectory=str(at))
            job.request = replace(job.request, logprobs=2 if at == 2 else None)
            loop.add(job)
            results.append(result)
            if not answers:
                kit.drain(loop)
        kit.drain(loop)
        return results

    alone = jobs(loop_on(target, prefill_chunk=16), None)
    together = jobs(loop_on(target, prefill_chunk=16), [result.tokens for result in alone])
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert [result.deltas[-1].report.steps < NEW for result in together] == [True] * 3
    mine, right = ([told for delta in results[2].deltas for told in delta.logprobs] for results in (together, alone))
    assert [told.token for told in mine] == list(alone[2].tokens)
    for one, other in zip(mine, right, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_after_accepts_rejects_preemptions_and_aborts_the_kv_equals_a_fresh_prefill(
    harness: Any, kit: Any, device: str, data: st.DataObject
) -> None:
    target = target_of("gemma 3", device)
    loop = loop_on(target, max_running=3, prefill_chunk=data.draw(st.sampled_from([4, 64])))
    jobs = []
    for at in range(data.draw(st.integers(1, 4))):
        prompt = prompts_of(data.draw(st.integers(0, 3)), 1)[0]
        kind = data.draw(st.sampled_from(["right", "wrong", "tree"]))
        sampling = data.draw(st.sampled_from([SamplingParams(), SamplingParams(logit_bias=((3, 1.0),))]))
        drafter = kit.Scripted(prompt, answer_of(harness, kit, target, tuple(prompt), sampling), kind)
        job, _ = harness.job(prompt, 12, drafter, sampling, trajectory=str(at % 2))
        loop.add(job)
        jobs.append(job)
    while not loop.idle:
        victim = data.draw(st.sampled_from([None, None, None, *jobs]))
        if victim is not None:
            victim.cancelled = True
        if loop.scheduler.running and data.draw(st.integers(0, 4)) == 0:
            loop.scheduler.preempt(data.draw(st.sampled_from(loop.scheduler.running)))
        loop.step()
    assert not loop.pool.running
    for kept in kit.sequences(loop.pool):
        fresh = PageTable(target.shape)
        target.forward([Segment(fresh, tuple(kept.tokens), tuple(range(len(kept.tokens))), None)], [])
        for layer in range(target.shape.layers):
            for mine, right in zip(
                kept.table.keys_and_values(layer, len(kept.tokens)),
                fresh.keys_and_values(layer, len(kept.tokens)),
                strict=True,
            ):
                torch.testing.assert_close(mine, right, rtol=0, atol=1e-4)


ANSWERS: dict[Any, tuple[int, ...]] = {}


def answer_of(
    harness: Any, kit: Any, target: DeviceTarget, prompt: tuple[int, ...], sampling: SamplingParams
) -> tuple[int, ...]:
    """What a prompt is answered without drafts."""
    if (prompt, sampling) not in ANSWERS:
        ANSWERS[prompt, sampling] = answered(kit, loop_on(target), harness.job(prompt, 12, sampling=sampling))
    return ANSWERS[prompt, sampling]


def test_recording_a_pass_moves_nothing_twice(harness: Any, kit: Any, device: str) -> None:
    class RunOnce:
        """Runs what it is given before the first use, as recording a graph does."""

        enabled = True

        def recorded(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
            run()
            return run

    target = DeviceTarget(model_of("qwen 3"), torch.device(device), KV_BYTES)
    target.graphs = RunOnce()  # type: ignore[assignment]
    prompt = prompts_of(2, 1)[0]
    answer = answered(kit, loop_on(target_of("qwen 3", device)), harness.job(prompt, 30))
    job, result = harness.job(prompt, 30, kit.Scripted(prompt, answer, "tree"))
    assert answered(kit, loop_on(target), (job, result)) == answer
    assert job.tally.steps < 15


def test_a_walk_that_the_host_makes_leaves_its_rows_where_they_are(device: str) -> None:
    target = target_of("mistral", device)
    segment = grown(target, random_segment(target, random.Random(1), 20, 1), SamplingParams())
    rows = range(len(segment.tokens))
    target.forward([segment], rows)
    before = [part.clone() for part in segment.table.keys_and_values(0, 20 + len(rows))]
    beside = random_segment(target, random.Random(2), 3, 4)
    made = target.verify([segment, beside], range(len(rows) + 4), [None, Draw(SamplingParams(), 0)])
    assert made.walks[0] is None
    assert made.walks[1] is not None
    after = segment.table.keys_and_values(0, 20 + len(rows))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    right = walk(
        DraftTree(segment.tokens, segment.parents or (), segment.depths, (0.0,) * 9, (0.0,) * 9, (0,) * 9),
        chooser(made.logits[: len(rows)].cpu(), Draw(SamplingParams(), 0)),
    )
    assert right.path == (0, 2, 4, 6, 8)


def test_pages_are_free_again_when_nobody_holds_them(device: str) -> None:
    target = DeviceTarget(model_of("mistral", num_hidden_layers=1), torch.device(device), 3 * 2**16)
    assert target.shape.positions == 3 * PAGE
    table = PageTable(target.shape)
    table.reserve(5 * PAGE)
    with pytest.raises(InternalError, match="no page"):
        target.shape.page()
    assert sorted(page.address for page in table.pages) == list(range(5))
    table.pages.clear()
    table.reserve(5 * PAGE)


def test_a_token_that_the_model_does_not_have_fails_its_pass_on_the_host(device: str) -> None:
    target = target_of("mistral", device)
    for token in (280, -1):
        with pytest.raises(KernelError, match="below 280"):
            target.forward([Segment(PageTable(target.shape), (token,), (0,), None)], [0])


def test_heads_that_the_kernels_do_not_know_are_named(device: str) -> None:
    with pytest.raises(ModelError, match=r"heads of 32 features.*64, 96, 128, 256"):
        DeviceTarget(model_of("mistral", head_dim=32), torch.device(device), KV_BYTES)


def test_half_precision_is_that_of_the_weights(device: str) -> None:
    model = model_of("llama 3").to(torch.bfloat16)
    target = DeviceTarget(model, torch.device(device), KV_BYTES)
    assert (target.dtype, target.shape.token_bytes) == ("bfloat16", 2 * 2 * 2 * 64 * 2)
    rows = [(30, 9, False), (5, 2, False)]
    made = logits_of(target, rows)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, logits_of(cpu_target_of("llama 3"), rows), rtol=0, atol=0.5)


def test_inputs_are_laid_out_as_the_kernels_read_them(device: str) -> None:
    target = target_of("mistral", device)
    dice = random.Random(3)
    segments = [random_segment(target, dice, 70, 3), random_segment(target, dice, 5, 1)]
    inputs = Inputs(rounded_extent(exact_extent(segments)), range(4), torch.device(device))
    inputs.fill(segments, [True, False], target.vocabulary)
    batch = inputs.batch
    assert batch.start.tolist() == [0, 3, 4]
    assert batch.length.tolist() == [70, 5]
    assert batch.owner.tolist() == [0, 0, 0, 1]
    assert inputs.position.tolist() == [70 + depth for depth in segments[0].depths] + [5]
    assert batch.table[0, :2].tolist() == [page.address for page in segments[0].table.pages]
    assert batch.first_scored.tolist() == inputs.first_scored(2) == [0, 3]
    assert inputs.walked.tolist() == [1, 0]
    assert batch.scored.dtype == torch.int64
    addresses = [part.data_ptr() for part in (batch.start, batch.table, batch.ancestors, inputs.token, inputs.walked)]
    assert all((address - addresses[0]) % 128 == 0 for address in addresses)
