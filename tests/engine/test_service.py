"""The engine behind its async face: concurrency, cancellation, limits, histories, shutdown."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig, Config, EngineConfig, ModelConfig
from agentspec.engine.service import Engine
from agentspec.errors import ConfigError, ContextTooLong, InvalidRequest, Overloaded, Unavailable
from agentspec.policies.cost import FixedCost
from agentspec.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Report,
    SamplingParams,
    Scope,
    SpeculationParams,
    Trajectory,
)

OFF = SpeculationParams(enabled=False)


def engine_on(folder: Path, **settings: Any) -> Engine:
    config = Config(model=ModelConfig(name=str(folder)), engine=EngineConfig(**settings))
    return Engine.from_folder(config, folder, Histories(CacheConfig()))


def run(folder: Path, scenario: Callable[[Engine], Awaitable[None]], **settings: Any) -> None:
    async def body() -> None:
        engine = engine_on(folder, **settings)
        try:
            await asyncio.wait_for(scenario(engine), 60)
        finally:
            await engine.close()

    asyncio.run(body())


def request(
    engine: Engine, text: str, trajectory: str = "t", tenant: str = "default", **fields: Any
) -> GenerationRequest:
    prompt = engine.render([{"role": "user", "content": text}], None)
    fields.setdefault("max_tokens", 30)
    return GenerationRequest(prompt, Trajectory(trajectory, Scope(tenant, "tiny")), **fields)


async def finished(engine: Engine, wanted: GenerationRequest) -> tuple[str, Report]:
    text, last = "", None
    async for delta in engine.generate(wanted):
        text, last = text + delta.text, delta
    assert last is not None and last.report is not None and last.finish is not None
    return text, last.report


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.95, seed=5)])
def test_histories_change_the_steps_and_not_the_tokens(tiny_model: Path, sampling: SamplingParams) -> None:
    async def scenario(engine: Engine) -> None:
        engine.loop.cost = FixedCost()
        off = await finished(engine, request(engine, "abcabcabc", speculation=OFF, sampling=sampling))
        first = await finished(engine, request(engine, "abcabcabc", sampling=sampling))
        again = await finished(engine, request(engine, "abcabcabc", sampling=sampling))
        assert off[0] == first[0] == again[0]
        assert off[1].token_ids == first[1].token_ids == again[1].token_ids
        assert off[1].steps == len(off[1].token_ids)
        assert again[1].steps < off[1].steps / 2
        assert sum(again[1].accepted.values()) == again[1].accepted_total > 0
        assert set(again[1].accepted) <= {"trajectory", "scope", "trajectory+scope"}
        assert sum(again[1].drafted.values()) == again[1].drafted_total
        assert off[1].draft_s == 0 < again[1].draft_s

    run(tiny_model, scenario)


def test_eng_29_a_request_with_speculation_off_drafts_nothing_and_teaches_nothing(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        engine.loop.cost = FixedCost()
        for _ in range(2):
            _, report = await finished(engine, request(engine, "tell me", speculation=OFF))
            assert (report.drafted_total, report.reason) == (0, "speculation is off for this request")
        assert engine.stats()["history_trajectories"] == 0

    run(tiny_model, scenario)


def test_eng_28_no_draft_has_a_reason(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        none = SpeculationParams(max_draft_tokens=0)
        _, report = await finished(engine, request(engine, "x", speculation=none))
        assert report.reason == "max_draft_tokens is 0"

    run(tiny_model, scenario)


@pytest.mark.parametrize("compiled", [True, False])
def test_exact_requests_are_drafted_for_where_a_row_has_the_same_bits_in_any_pass(
    tiny_model: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.engine.target.is_compilable", lambda _: compiled)

    async def scenario(engine: Engine) -> None:
        engine.loop.cost = FixedCost()
        assert engine.loop.target.exact == compiled
        exact = request(engine, "tell me", max_tokens=60, speculation=SpeculationParams(exact=True))
        off = await finished(engine, request(engine, "tell me", max_tokens=60, speculation=OFF))
        for _ in range(2):
            text, report = await finished(engine, exact)
            assert text == off[0]
        assert (report.drafted_total > 0) == compiled
        assert (report.reason or "").startswith("exact: this model's logits") != compiled

    run(tiny_model, scenario)


@pytest.mark.parametrize("drafters", [("tlar",), ("trajectory", "tlar")])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.95, seed=5)])
def test_a_run_drafts_from_its_own_answers_and_the_tokens_stay(
    tiny_model: Path, drafters: tuple[str, ...], sampling: SamplingParams
) -> None:
    async def scenario(engine: Engine) -> None:
        engine.loop.cost = FixedCost()
        asked = request(engine, "abcabcabc", max_tokens=60, sampling=sampling)
        _, off = await finished(engine, replace(asked, speculation=OFF))
        drafted = replace(asked, speculation=SpeculationParams(drafters=drafters))
        reports = [(await finished(engine, drafted))[1] for _ in range(512 // len(off.token_ids) + 2)]
        assert {report.token_ids for report in reports} == {off.token_ids}
        sources = {name for report in reports for name in report.drafted}
        assert sources <= {"tlar", "trajectory", "trajectory+tlar"}
        assert not any("tlar" in name for name in reports[0].drafted)
        assert sum(count for name, count in reports[-1].accepted.items() if "tlar" in name) > 0
        assert reports[-1].steps < off.steps

    run(tiny_model, scenario)


def test_an_unknown_drafter_is_refused_by_name(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(InvalidRequest, match="eagle"):
            await finished(engine, request(engine, "x", speculation=SpeculationParams(drafters=("eagle",))))

    run(tiny_model, scenario)


def test_sfx_05_no_draft_crosses_tenants(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        engine.loop.cost = FixedCost()
        secret = request(engine, "the launch code is 8713-ab", tenant="a")
        await finished(engine, secret)
        await finished(engine, request(engine, "q", tenant="a"))
        other = replace(secret, trajectory=Trajectory("t", Scope("b", "tiny")))
        _, crossed = await finished(engine, other)
        assert crossed.cached_tokens == 0
        _, own = await finished(engine, replace(secret, trajectory=Trajectory("new", Scope("a", "tiny"))))
        assert own.accepted_total > crossed.accepted_total
        assert own.accepted.get("scope", 0) > 0 == crossed.accepted.get("scope", 0)

    run(tiny_model, scenario)


def test_many_clients_at_once_get_what_each_gets_alone(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        wanted = [request(engine, f"client {i} says {i * 7}", trajectory=str(i)) for i in range(12)]
        alone = [(await finished(engine, replace(w, speculation=OFF)))[1].token_ids for w in wanted]
        together = await asyncio.gather(*[finished(engine, w) for w in wanted])
        assert [report.token_ids for _, report in together] == alone

    run(tiny_model, scenario, max_running=5)


async def started(engine: Engine, wanted: GenerationRequest) -> AsyncIterator[Delta]:
    deltas = engine.generate(wanted)
    await anext(deltas)
    return deltas


def test_prx_05_closing_early_frees_the_place_at_once(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        for _ in range(5):
            deltas: Any = await started(engine, request(engine, "long", max_tokens=300, speculation=OFF))
            await deltas.aclose()
        await asyncio.sleep(0.2)
        assert engine.stats()["running_requests"] == 0
        _, report = await finished(engine, request(engine, "next"))
        assert report.completion_tokens > 0

    run(tiny_model, scenario, max_running=1)


def test_a_request_cancelled_in_the_queue_never_runs(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        first = asyncio.create_task(finished(engine, request(engine, "a", max_tokens=200)))
        second = asyncio.create_task(finished(engine, request(engine, "b", max_tokens=200)))
        await asyncio.sleep(0.02)
        second.cancel()
        await first
        with contextlib.suppress(asyncio.CancelledError):
            await second
        await asyncio.sleep(0.1)
        assert engine.stats()["running_requests"] == engine.stats()["waiting_requests"] == 0
        assert engine.stats()["history_sessions"] == 0

    run(tiny_model, scenario, max_running=1)


def test_a_full_queue_is_refused(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        tasks = [asyncio.create_task(finished(engine, request(engine, "q", max_tokens=100))) for _ in range(8)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [r for r in results if isinstance(r, Overloaded)]
        assert refused and refused[0].retry_after
        assert len([r for r in results if isinstance(r, tuple)]) == 8 - len(refused) >= 2

    run(tiny_model, scenario, max_running=1, max_queue=2)


def test_api_28_a_prompt_over_the_window_is_named(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(ContextTooLong, match="512"):
            await finished(engine, request(engine, "x" * 600))
        _, report = await finished(engine, request(engine, "x" * 400, max_tokens=10_000, speculation=OFF))
        assert report.prompt_tokens + report.completion_tokens <= 512

    run(tiny_model, scenario)


def test_eng_22_rows_are_independent_of_their_neighbours(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        seeded = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 99, 2)]
        wanted = [request(engine, "same prompt", trajectory=str(i), sampling=s) for i, s in enumerate(seeded)]
        alone = [(await finished(engine, replace(w, speculation=OFF)))[1].token_ids for w in wanted]
        together = await asyncio.gather(*[finished(engine, w) for w in wanted])
        assert [report.token_ids for _, report in together] == alone
        assert len(set(alone)) == 3

    run(tiny_model, scenario)


def test_a_stop_string_ends_text_and_tokens_together(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        text, whole = await finished(engine, request(engine, "go", max_tokens=60, speculation=OFF))
        stop = text[10:13]
        for speculation in (OFF, SpeculationParams(), SpeculationParams()):
            cut, report = await finished(
                engine, request(engine, "go", max_tokens=60, stop=(stop,), speculation=speculation)
            )
            assert cut == text[: text.index(stop)]
            assert report.token_ids == whole.token_ids[: report.completion_tokens]
            assert report.completion_tokens < whole.completion_tokens

    run(tiny_model, scenario)


def test_closing_fails_what_runs_and_refuses_what_comes(tiny_model: Path) -> None:
    async def scenario() -> None:
        engine = engine_on(tiny_model)
        deltas = await started(engine, request(engine, "x", max_tokens=400, speculation=OFF))
        await engine.close()
        with pytest.raises(Unavailable):
            async for _ in deltas:
                pass
        with pytest.raises(Unavailable):
            await finished(engine, request(engine, "y"))

    asyncio.run(scenario())


def test_finish_reasons(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        async for delta in engine.generate(request(engine, "x", max_tokens=1)):
            last = delta
        assert last.finish is FinishReason.LENGTH
        assert last.report is not None and last.report.completion_tokens == 1

    run(tiny_model, scenario)


def test_a_memory_too_small_for_any_request_is_refused_at_start(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="AGENTSPEC_ENGINE_KV_BYTES is 400: too small for any request"):
        engine_on(tiny_model, kv_bytes=400)


def test_a_window_too_small_for_any_request_is_refused_at_start(tiny_model: Path) -> None:
    config = Config(model=ModelConfig(name=str(tiny_model), window=1))
    with pytest.raises(ConfigError, match="AGENTSPEC_MODEL_WINDOW must be at least 2 or 0, got 1"):
        Engine.from_folder(config, tiny_model, Histories(CacheConfig()))


def test_a_memory_smaller_than_the_window_makes_the_window_smaller(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(engine: Engine) -> None:
        assert engine.window == 64
        assert "AGENTSPEC_ENGINE_KV_BYTES limits the window to 64 of 512 tokens" in caplog.text
        asked = replace(request(engine, "hi"), prompt=(65,) * 63, max_tokens=9)
        deltas = [delta async for delta in engine.generate(asked)]
        assert deltas[-1].finish is not None
        assert sum(delta.tokens for delta in deltas) == 1

    run(tiny_model, scenario, kv_bytes=127 * 1024)


def test_an_engine_whose_thread_died_leaves_nobody_waiting(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        def broken() -> None:
            raise MemoryError

        engine.loop.step = broken  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="the engine has stopped"):
            await anext(engine.generate(request(engine, "hi")))
        await asyncio.to_thread(engine._thread.join)
        with pytest.raises(Unavailable, match="the engine has stopped"):
            engine.stats()
        with pytest.raises(Unavailable):
            await anext(engine.generate(request(engine, "hi")))

    run(tiny_model, scenario)


def test_a_grammar_holds_through_the_engine_and_a_bad_one_harms_nobody(tiny_model: Path) -> None:
    grammar = Grammar(GrammarKind.REGEX, "The answer is [0-9]{4}", "guided_regex")
    bad = Grammar(GrammarKind.REGEX, "(", "guided_regex")

    async def scenario(engine: Engine) -> None:
        engine.loop.cost = FixedCost()
        plain, off = await finished(engine, request(engine, "hi", grammar=grammar, speculation=OFF))
        with pytest.raises(InvalidRequest, match="guided_regex"):
            await finished(engine, request(engine, "hi", grammar=bad))
        text, report = await finished(engine, request(engine, "hi", grammar=grammar))
        assert plain == text and plain.startswith("The answer is ") and plain[14:].isdigit()
        assert off.drafted_total == 0 and report.accepted["grammar"] == 14
        only = SpeculationParams(drafters=("grammar",))
        again, report = await finished(engine, request(engine, "hi", grammar=grammar, speculation=only))
        assert again == text and report.drafted == {"grammar": 14}

    run(tiny_model, scenario)
