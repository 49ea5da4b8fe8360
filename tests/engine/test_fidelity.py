"""Answers that come back as text are computed no second time, whatever their text is tokenised to."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.cache.retrieval import Histories
from agentspec.cache.store import make_store
from agentspec.config import CacheConfig, Config, ModelConfig, ServerConfig
from agentspec.engine.service import Engine
from agentspec.policies.cost import FixedCost
from agentspec.server.app import create_app
from agentspec.server.convert import generation_requests
from agentspec.server.wire import ChatRequest, parse_request
from agentspec.types import Scope, Trajectory

RUN = "X-AgentSpec-Trajectory"
LETTERS = "abcd "

Scenario = Callable[["Agent"], Awaitable[None]]


class Agent:
    """Asks an engine for answers of single letters, most of which its tokenizer would join."""

    def __init__(self, client: httpx.AsyncClient, engine: Engine) -> None:
        self.client = client
        self.engine = engine
        tokens = [engine.tokenize(letter, special=False)[0] for letter in LETTERS]
        self.body: dict[str, Any] = {
            "logit_bias": {str(token): 100 for token in tokens},
            "temperature": 2,
            "seed": 5,
            "max_tokens": 40,
            "speculation": {"report": True},
        }

    async def post(self, messages: list[dict[str, Any]], run: str | None = "run", **fields: Any) -> dict[str, Any]:
        headers = {} if run is None else {RUN: run}
        headers |= fields.pop("headers", {})
        body = {**self.body, "messages": messages, **fields}
        response = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        content: dict[str, Any] = response.json()
        return content

    async def says(self, messages: list[dict[str, Any]], run: str | None = "run", **fields: Any) -> tuple[str, int]:
        """What the model answers, and how many answers were put into the prompt."""
        content = await self.post(messages, run, **fields)
        return content["choices"][0]["message"]["content"], content["agentspec"]["spliced"]

    def count(self, name: str) -> float:
        return self.engine.stats()[name]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def run(folder: Path, scenario: Scenario, cache: CacheConfig | None = None, window: int = 0) -> None:
    """A scenario with a fresh engine."""

    async def body() -> None:
        config = Config(model=ModelConfig(name=str(folder), window=window), cache=cache or CacheConfig())
        engine = Engine.from_folder(config, folder, Histories(config.cache, make_store(config.cache)))
        engine.loop.cost = FixedCost()
        transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                await asyncio.wait_for(scenario(Agent(client, engine)), 60)
        finally:
            await engine.close()

    asyncio.run(body())


TALK = [user("say ab"), user("and cd")]


async def two_turns(agent: Agent, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    first = await agent.post(TALK[:1], **fields)
    text = first["choices"][0]["message"]["content"]
    return first, await agent.post([TALK[0], assistant(text), TALK[1]], **fields)


@pytest.mark.parametrize("speculation", [True, False])
def test_the_next_turn_begins_with_what_the_engine_holds(merging_model: Path, speculation: bool) -> None:
    async def scenario(agent: Agent) -> None:
        first, second = await two_turns(agent, speculation={"enabled": speculation, "report": True})
        text = first["choices"][0]["message"]["content"]
        generated = first["agentspec"]["token_ids"]
        rendered = agent.engine.render([TALK[0], assistant(text), TALK[1]], None)
        assert len(generated) > len(agent.engine.tokenize(text, special=False))
        usage = second["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
        assert usage["prompt_tokens"] > len(rendered)
        assert second["agentspec"]["spliced"] == 1
        assert agent.count("returned_spliced_total") == 1 and agent.count("returned_identical_total") == 0
        assert agent.count("spliced_tokens_total") > 0 and agent.count("spliced_cached_tokens_total") > 0

    run(merging_model, scenario)


def test_without_the_setting_prompts_are_tokenised_as_a_whole(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        first, second = await two_turns(agent)
        usage = second["usage"]
        assert second["agentspec"]["spliced"] == 0
        assert usage["prompt_tokens_details"]["cached_tokens"] < first["usage"]["total_tokens"] - 1
        assert agent.count("splice_bytes") == 0 and agent.count("returned_spliced_total") == 0

    run(merging_model, scenario, CacheConfig(splice_bytes=0))


def test_turns_say_the_same_with_drafts_and_without(merging_model: Path) -> None:
    said = list[list[str]]()

    async def scenario(agent: Agent) -> None:
        messages, texts = list[dict[str, Any]](), list[str]()
        for turn in range(4):
            messages.append(user(f"turn {turn}"))
            enabled = {"enabled": len(said) == 1, "report": True}
            texts.append((await agent.says(messages, speculation=enabled, seed=turn))[0])
            messages.append(assistant(texts[-1]))
        assert agent.count("returned_spliced_total") >= 2
        assert agent.count("returned_spliced_total") + agent.count("returned_identical_total") == 3
        said.append(texts)

    run(merging_model, scenario)
    run(merging_model, scenario)
    assert said[0] == said[1]


def test_conversations_that_are_known_by_their_messages_alone(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        text, _ = await agent.says(TALK[:1], None)
        talk = [TALK[0], assistant(text), TALK[1]]
        assert (await agent.says(talk, None))[1] == 1
        assert (await agent.says([TALK[0], assistant(text), user("a fork")], None))[1] == 1

    run(merging_model, scenario)


def test_an_edited_answer_another_run_and_a_prompt_of_token_ids_stay_as_they_came(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        text, _ = await agent.says(TALK[:1])
        talk = [TALK[0], assistant(text), TALK[1]]
        assert (await agent.says([TALK[0], assistant(text + "a"), TALK[1]]))[1] == 0
        assert agent.count("returned_changed_other_total") == 1
        assert (await agent.says(talk, "another"))[1] == 0
        rendered = list(agent.engine.render(talk, None))
        content = (
            await agent.client.post("/v1/completions", json={"prompt": rendered, "max_tokens": 1}, headers={RUN: "run"})
        ).json()
        assert content["usage"]["prompt_tokens"] == len(rendered)
        assert (await agent.says(talk))[1] == 1

    run(merging_model, scenario)


def test_a_sub_agent_begins_with_its_parent_s_turns(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        text, _ = await agent.says(TALK[:1])
        talk = [TALK[0], assistant(text), user("go on alone")]
        assert (await agent.says(talk, "stranger"))[1] == 0
        assert (await agent.says(talk, "child", headers={"X-AgentSpec-Parent": "run"}))[1] == 1

    run(merging_model, scenario)


def test_whichever_choice_comes_back(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        first = await agent.post(TALK[:1], n=3)
        for choice in first["choices"]:
            talk = [TALK[0], assistant(choice["message"]["content"]), TALK[1]]
            content = await agent.post(talk)
            assert content["agentspec"]["spliced"] == 1
            cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= first["usage"]["prompt_tokens"] + 39

    run(merging_model, scenario)


@pytest.mark.parametrize("fields", [{"stop": ["bb"]}, {"stop": ["d a"]}, {"max_tokens": 7}, {"max_tokens": 1}])
def test_answers_that_were_cut(merging_model: Path, fields: dict[str, Any]) -> None:
    async def scenario(agent: Agent) -> None:
        text, _ = await agent.says(TALK[:1], **fields)
        talk = [TALK[0], assistant(text), TALK[1]]
        content = await agent.post(talk)
        single = [agent.engine.tokenize(letter, special=False)[0] for letter in text]
        rendered = agent.engine.tokenize(text, special=False)
        assert content["agentspec"]["spliced"] == (list(rendered) != single)
        expected = len(agent.engine.render(talk, None)) - len(rendered) + len(single)
        assert content["usage"]["prompt_tokens"] == expected

    run(merging_model, scenario)


def test_a_stream_that_was_left_midway(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        body = {**agent.body, "messages": TALK[:1], "max_tokens": 400}
        prompt = agent.engine.render(TALK[:1], None)
        trajectory = Trajectory("run", Scope("default", agent.engine.model))
        asked = parse_request(ChatRequest, body)
        request = generation_requests(asked, [prompt], trajectory, agent.engine.window)[0]
        text, source = "", agent.engine.generate(replace(request, rendered=True))
        assert isinstance(source, AsyncGenerator)
        async for delta in source:
            text += delta.text
            if len(text) > 20:
                break
        await source.aclose()
        for part in (text, text[:12]):
            assert (await agent.says([TALK[0], assistant(part), TALK[1]]))[1] == 1

    run(merging_model, scenario)


def test_deleting_a_trajectory_takes_its_answers(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        text, _ = await agent.says(TALK[:1], speculation={"enabled": False, "report": True})
        kept = (await agent.client.get("/v1/trajectories/run")).json()
        assert kept["memory_bytes"] > 0
        assert agent.count("splice_bytes") > 0
        assert (await agent.client.delete("/v1/trajectories/run")).status_code == 200
        assert agent.count("splice_bytes") == 0
        assert (await agent.client.get("/v1/trajectories/run")).status_code == 404
        assert (await agent.says([TALK[0], assistant(text), TALK[1]]))[1] == 0

    run(merging_model, scenario)


def test_an_answer_that_is_deleted_while_it_is_made_is_not_kept(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        asked = asyncio.create_task(agent.says(TALK[:1], max_tokens=200))
        while not agent.count("steps_total"):
            await asyncio.sleep(0.001)
        await agent.client.delete("/v1/trajectories/run")
        text, _ = await asked
        assert agent.count("splice_bytes") == 0
        assert (await agent.says([TALK[0], assistant(text), TALK[1]]))[1] == 0

    run(merging_model, scenario)


def test_parallel_requests_of_one_trajectory(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        asked = [[user(f"question {number}")] for number in range(4)]
        texts = await asyncio.gather(*(agent.says(one) for one in asked))
        talks = [[*one, assistant(text), TALK[1]] for one, (text, _) in zip(asked, texts, strict=True)]
        assert [put for _, put in await asyncio.gather(*(agent.says(talk) for talk in talks))] == [1] * 4

    run(merging_model, scenario)


def test_answers_come_back_after_a_restart_from_the_store(merging_model: Path, tmp_path: Path) -> None:
    cache, texts = CacheConfig(history_file=str(tmp_path / "histories")), list[str]()

    async def before(agent: Agent) -> None:
        texts.append((await agent.says(TALK[:1]))[0])
        texts.append((await agent.says([TALK[0], assistant(texts[0]), TALK[1]], seed=9))[0])

    async def after(agent: Agent) -> None:
        talk = [TALK[0], assistant(texts[0]), TALK[1], assistant(texts[1]), user("more")]
        assert (await agent.says(talk, "stranger"))[1] == 0
        child = {"X-AgentSpec-Parent": "run"}
        assert (await agent.says(talk, "child", headers=child))[1] == 2
        text, put = await agent.says(talk)
        assert put == 2
        assert (await agent.says([*talk, assistant(text), user("and more")]))[1] == 3

    run(merging_model, before, cache)
    run(merging_model, after, cache)


STRIPPING = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FORGETTING = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'].split('c')[-1] if message['role'] == 'assistant' else message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("template", "how"), [(STRIPPING, "space"), (FORGETTING, "part")])
def test_templates_that_change_answers_are_asked_what_they_say(merging_model: Path, template: str, how: str) -> None:
    async def scenario(agent: Agent) -> None:
        agent.engine.chat.tokenizer.chat_template = template
        text, _ = await agent.says(TALK[:1], guided_regex=" [ab]{8}c[ab]{8} ")
        talk = [TALK[0], assistant(text), TALK[1]]
        content = await agent.post(talk)
        assert content["agentspec"]["spliced"] == 0
        assert content["usage"]["prompt_tokens"] == len(agent.engine.render(talk, None))
        assert agent.count(f"returned_changed_{how}_total") == 1

    run(merging_model, scenario)


def test_a_prompt_that_would_no_longer_fit_stays_as_it_came(merging_model: Path) -> None:
    async def scenario(agent: Agent) -> None:
        text, _ = await agent.says(TALK[:1])
        talk = [TALK[0], assistant(text), TALK[1]]
        filler = 100 - len(agent.engine.render(talk, None)) - 1
        content = await agent.post([*talk[:2], user(TALK[1]["content"] + "x" * filler)])
        assert content["agentspec"]["spliced"] == 0 and content["usage"]["prompt_tokens"] == 99

    run(merging_model, scenario, window=100)
