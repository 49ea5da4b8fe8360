"""Looking at trajectories and deleting them over HTTP; nobody names a tenant."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.engine.service import Engine
from agentspec.errors import InvalidRequest, Unavailable
from agentspec.server.chain import Chain
from agentspec.server.identity import Identity
from agentspec.server.wire import ChatRequest, parse_request
from agentspec.types import Scope, Trajectory, TrajectoryState
from tests.server.conftest import CHAT, HELLO, ScriptedWorker, ask, client_of, error_of, send
from tests.serving import in_process

RUN = Trajectory("s/a run", Scope("default", "served"))
STATE = TrajectoryState(5, 2, 1000.5, 100, 20, 300, 9, 4)
URL = "/v1/trajectories/s/a%20run"


def test_a_trajectory_is_shown() -> None:
    response = send(ScriptedWorker(known={RUN: STATE}), "GET", URL)
    assert response.status_code == 200
    assert response.json() == {
        "id": "s/a run",
        "object": "trajectory",
        "model": "served",
        "tokens": 5,
        "turns": 2,
        "last_used": 1000.5,
        "memory_bytes": 100,
        "stored_bytes": 20,
        "kv_bytes": 300,
        "drafted": 9,
        "accepted": 4,
    }


def test_a_trajectory_is_deleted_once() -> None:
    worker = ScriptedWorker(known={RUN: STATE})
    assert send(worker, "DELETE", URL).json() == {"id": "s/a run", "object": "trajectory.deleted", "deleted": True}
    response = send(worker, "DELETE", URL)
    assert response.status_code == 404
    assert error_of(response)["message"] == "there is no trajectory 's/a run'"
    assert send(worker, "GET", URL).status_code == 404


@pytest.mark.parametrize("name", ["", "x" * 201, "%00", "%C3%BC", "a%7Fb"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_what_is_no_id_is_refused(method: str, name: str) -> None:
    response = send(ScriptedWorker(), method, f"/v1/trajectories/{name}")
    assert response.status_code == 400
    assert error_of(response)["param"] == "id"


def test_other_methods_are_not_allowed() -> None:
    assert send(ScriptedWorker(), "POST", URL, content=b"{}").status_code == 405


def test_a_deletion_that_is_not_confirmed_is_told() -> None:
    response = send(ScriptedWorker(failure=Unavailable("the store did not confirm")), "DELETE", URL)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"


def test_messages_of_a_deleted_trajectory_are_not_recognised_any_more() -> None:
    worker = ScriptedWorker()
    more = [*HELLO, {"role": "assistant", "content": "Hello world"}, {"role": "user", "content": "more"}]

    async def run() -> list[str]:
        async with client_of(worker) as client:
            await client.post(CHAT, json=ask())
            first = worker.requests[0].trajectory.id
            await client.post(CHAT, json=ask(messages=more))
            assert (await client.delete(f"/v1/trajectories/{first}")).status_code == 200
            assert (await client.delete(f"/v1/trajectories/{first}")).status_code == 404
            await client.post(CHAT, json=ask(messages=more))
        return [request.trajectory.id for request in worker.requests]

    first, second, third = asyncio.run(run())
    assert first == second != third


def test_a_chain_forgets_one_owner() -> None:
    chain = Chain()
    chain.learn([b"a", b"b"], "one")
    chain.learn([b"a", b"c"], "two")
    assert chain.forget("one") and not chain.forget("one")
    assert len(chain) == 1
    assert chain.find([b"a", b"b"]) is None
    match = chain.find([b"a", b"c"])
    assert match is not None and match.owner == "two"


TENANT_LIKE = [
    "x-agentspec-tenant", "x-tenant", "x-tenant-id", "authorization", "openai-organization", "openai-project",
    "x-api-key", "x-forwarded-user", "x-agentspec-trajectory", "x-agentspec-parent", "session-id", "x-session-id",
    "x-claude-code-session-id", "x-claude-code-agent-id", "x-litellm-session-id",
]  # fmt: skip
IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(TENANT_LIKE), IDS), IDS, st.one_of(st.none(), IDS))
def test_no_header_id_or_field_leaves_the_tenant(headers: dict[str, str], name: str, user: str | None) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "metadata": {"trajectory_id": name, "tenant": name}}
    asked = parse_request(ChatRequest, {**fields, **({"user": user} if user else {})})
    identity = Identity("served")
    with suppress(InvalidRequest):
        found = identity.resolve(httpx.Headers(headers), asked, identity.digests(asked, None, HELLO))
        assert found.scope == Scope("default", "served")
    assert identity.named(name).scope == Scope("default", "served")


def test_ready_says_what_is_degraded() -> None:
    assert send(ScriptedWorker(gauges={"store_breaker_open": 0}), "GET", "/ready").json() == {"status": "ready"}
    for gauge in ("store_breaker_open", "store_file_behind"):
        response = send(ScriptedWorker(gauges={gauge: 1}), "GET", "/ready")
        assert response.status_code == 200
        assert len(response.json()["degraded"]) == 1


def test_from_a_chat_to_its_deletion(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        body = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
        first = await client.post(CHAT, json=body, headers={"x-agentspec-trajectory": "mine"})
        assert first.status_code == 200
        shown = (await client.get("/v1/trajectories/mine")).json()
        assert shown["tokens"] > 20 and shown["turns"] == 1 and shown["kv_bytes"] > 0
        assert (await client.delete("/v1/trajectories/mine")).json()["deleted"] is True
        assert (await client.get("/v1/trajectories/mine")).status_code == 404
        again = await client.post(CHAT, json=body, headers={"x-agentspec-trajectory": "mine"})
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again.json()["choices"] == first.json()["choices"]

    in_process(tiny_model, scenario)
