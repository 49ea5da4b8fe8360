"""Deletions while a request is being read, rendered or compiled for: they apply to it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.engine.service import Engine
from agentspec.server.arrivals import Arrivals
from agentspec.types import Scope, Trajectory
from tests.server.conftest import CHAT, HELLO, ScriptedWorker, ask, client_of, error_of, send
from tests.serving import in_process

MORE = [*HELLO, {"role": "assistant", "content": "Hello world"}, {"role": "user", "content": "more"}]
NAMED = {"x-agentspec-trajectory": "mine"}


class SlowToRender(ScriptedWorker):
    """Renders when it is let."""

    def begin(self) -> None:
        self.rendering, self.let = threading.Event(), threading.Event()
        self.let.set()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        self.rendering.set()
        assert self.let.wait(10)
        return super().render(messages, tools)


def meanwhile(body: Callable[[httpx.AsyncClient, SlowToRender], Awaitable[None]]) -> list[str]:
    """The trajectories of the requests that a body makes."""
    worker = SlowToRender()
    worker.begin()

    async def run() -> None:
        async with client_of(worker) as client:
            await body(client, worker)

    asyncio.run(asyncio.wait_for(run(), 20))
    return [request.trajectory.id for request in worker.requests]


async def with_deletion(
    client: httpx.AsyncClient, worker: SlowToRender, name: str, headers: dict[str, str] | None = None
) -> float:
    """A request that goes on with a conversation, whose trajectory is deleted while it is rendered."""
    worker.rendering.clear()
    worker.let.clear()
    asking = asyncio.ensure_future(client.post(CHAT, json=ask(messages=MORE), headers=headers))
    await asyncio.to_thread(worker.rendering.wait)
    moment = asyncio.get_running_loop().time()
    await client.delete(f"/v1/trajectories/{name}")
    worker.let.set()
    assert (await asking).status_code == 200
    return moment


def test_a_request_known_by_its_messages_belongs_to_the_trajectory_that_is_deleted_meanwhile() -> None:
    async def body(client: httpx.AsyncClient, worker: SlowToRender) -> None:
        await client.post(CHAT, json=ask())
        moment = await with_deletion(client, worker, worker.requests[0].trajectory.id)
        assert worker.requests[1].received < moment
        await client.post(CHAT, json=ask(messages=MORE))
        assert worker.requests[2].received > moment

    first, second, third = meanwhile(body)
    assert first == second != third


def test_messages_of_a_request_whose_trajectory_is_deleted_meanwhile_are_not_remembered() -> None:
    async def body(client: httpx.AsyncClient, worker: SlowToRender) -> None:
        await with_deletion(client, worker, "mine", NAMED)
        await client.post(CHAT, json=ask(messages=MORE))
        await client.post(CHAT, json=ask(messages=MORE), headers=NAMED)
        await client.post(CHAT, json=ask(messages=[*MORE, *MORE[-2:]]), headers=NAMED)

    first, second, third, fourth = meanwhile(body)
    assert (first, third, fourth) == ("mine", "mine", "mine") and second != "mine"


def test_a_fork_that_is_known_by_more_messages_stays_apart() -> None:
    async def body(client: httpx.AsyncClient, worker: SlowToRender) -> None:
        await client.post(CHAT, json=ask(), headers=NAMED)
        await client.post(CHAT, json=ask(messages=MORE[:3]), headers={"x-agentspec-trajectory": "fork"})
        await with_deletion(client, worker, "mine")

    assert meanwhile(body) == ["mine", "fork", "fork"]


def test_deletions_are_remembered_while_a_request_before_them_is_under_way() -> None:
    arrivals = Arrivals()
    arrivals.note("a", [b"1"])
    with arrivals.receiving() as first:
        assert not arrivals.deleted("a", first)
        arrivals.note("b", [b"2"])
        with arrivals.receiving() as second:
            arrivals.note("c", [b"3"])
            assert [arrivals.deleted(owner, first) for owner in "abc"] == [False, True, True]
            assert [arrivals.deleted(owner, second) for owner in "abc"] == [False, False, True]
            assert arrivals.sender(b"2", first) == "b" and arrivals.sender(b"2", second) is None
    assert not arrivals.deleted("b", first) and arrivals.sender(b"3", first) is None


@pytest.mark.parametrize("method", ["PUT", "PATCH", "POST"])
def test_other_methods_are_told_which_there_are(method: str) -> None:
    response = send(ScriptedWorker(), method, "/v1/trajectories/x", content=b"{}")
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("url", ["/v1/trajectories", "/v1/trajectories/"])
def test_no_id_is_no_redirection(method: str, url: str) -> None:
    response = send(ScriptedWorker(), method, url)
    assert response.status_code == 400 and error_of(response)["param"] == "id"


def test_a_chat_with_a_grammar_leaves_nothing_when_it_is_deleted_at_any_moment(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        trajectory = Trajectory("mine", Scope("default", "tiny"))
        for number, delay in enumerate((0.0, 0.002, 0.01, 0.05)):
            text = f"a text of more than sixty-four bytes that fills at least one page of keys and values: {number}"
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 30,
                "temperature": 0,
                "guided_regex": f"[a-z{number} ]{{3,25}}",
            }
            asking = asyncio.ensure_future(client.post(CHAT, json=body, headers=NAMED))
            await asyncio.sleep(delay)
            while not engine_knows(engine) and delay == 0.0:
                await asyncio.sleep(0)
            await client.delete("/v1/trajectories/mine")
            assert (await asking).status_code == 200
            await engine.histories.flush()
            assert await engine.inspect(trajectory) is None
            assert engine.loop.pool.pages == 0 and not engine.loop.pool.tips
            assert engine.histories.shelf.scopes[trajectory.scope].index.tokens == 0

    def engine_knows(engine: Engine) -> bool:
        return bool(engine.histories.shelf.scopes)

    in_process(tiny_model, scenario)
