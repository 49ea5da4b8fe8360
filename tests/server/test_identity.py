"""Which trajectory a request belongs to."""

import asyncio
from typing import Any

import pytest

from agentspec.server.chain import Chain, Match, prefix_digests
from agentspec.types import Scope, Trajectory
from tests.server.conftest import CHAT, HELLO, ScriptedWorker, ask, client_of, error_of, post

SYSTEM = {"role": "system", "content": "be brief"}
ANSWER = {"role": "assistant", "content": "hi"}
MORE = {"role": "user", "content": "more"}


def trajectories(*bodies: dict[str, Any], headers: dict[str, str] | None = None) -> list[Trajectory]:
    """The trajectories of requests to one app, in order."""
    worker = ScriptedWorker()

    async def run() -> None:
        async with client_of(worker) as client:
            for body in bodies:
                response = await client.post(CHAT, json=body, headers=headers)
                assert response.status_code == 200, response.text
                assert response.headers["x-agentspec-trajectory"] == worker.requests[-1].trajectory.id

    asyncio.run(run())
    return [request.trajectory for request in worker.requests]


def of_headers(**headers: str) -> tuple[str, str | None]:
    (found,) = trajectories(ask(), headers={name.replace("_", "-"): value for name, value in headers.items()})
    return found.id, found.parent


def test_own_headers_decide() -> None:
    (found,) = trajectories(
        ask(metadata={"trajectory_id": "m"}),
        headers={"X-AgentSpec-Trajectory": "a", "X-AgentSpec-Parent": "b", "Session-Id": "c"},
    )
    assert found == Trajectory("a", Scope("default", "served"), "b")


def test_prx_13_session_headers_of_coding_agents() -> None:
    assert of_headers(x_claude_code_session_id="s") == ("s", None)
    assert of_headers(x_claude_code_session_id="s", x_claude_code_agent_id="a") == ("s/a", "s")
    sub = {"x_claude_code_session_id": "s", "x_claude_code_agent_id": "b", "x_claude_code_parent_agent_id": "a"}
    assert of_headers(**sub) == ("s/b", "s/a")
    assert of_headers(session_id="codex") == ("codex", None)
    assert of_headers(x_session_id="child", x_parent_session_id="root") == ("child", "root")
    assert of_headers(x_dynamo_session_id="d", x_dynamo_parent_session_id="e", session_id="f") == ("d", "e")
    assert of_headers(x_litellm_session_id="l") == ("l", None)


def test_hints_in_the_body() -> None:
    found = trajectories(
        ask(metadata={"trajectory_id": "t", "session_id": "s"}),
        ask(metadata={"session_id": "s"}, prompt_cache_key="k"),
        ask(prompt_cache_key="k"),
        ask(prompt_cache_key="ключ" * 100),
    )
    assert [trajectory.id for trajectory in found[:3]] == ["t", "s", "k"]
    assert found[3].id.isascii() and len(found[3].id) <= 200


@pytest.mark.parametrize("value", ["", "x" * 201, "a\tb", "caf\xe9"])
@pytest.mark.parametrize("name", ["x-agentspec-trajectory", "x-agentspec-parent", "x-session-id"])
def test_bad_ids_are_refused_by_name(name: str, value: str) -> None:
    async def once() -> Any:
        async with client_of(ScriptedWorker()) as client:
            return await client.post(CHAT, json=ask(), headers=[(name.encode(), value.encode("latin-1"))])

    response = asyncio.run(once())
    assert response.status_code == 400
    assert error_of(response)["param"] == name


def test_bad_ids_in_metadata_are_refused() -> None:
    for value in ["日本", 3, "", "x" * 201]:
        response = post(ScriptedWorker(), ask(metadata={"session_id": value}))
        assert response.status_code == 400
        assert error_of(response)["param"] == "metadata.session_id"


def test_a_trajectory_is_not_its_own_parent() -> None:
    response = post(ScriptedWorker(), ask(), {"x-agentspec-trajectory": "a", "x-agentspec-parent": "a"})
    assert error_of(response)["param"] == "x-agentspec-parent"


def test_a_longer_conversation_continues() -> None:
    first, second, third = trajectories(
        ask(messages=[SYSTEM, *HELLO]),
        ask(messages=[SYSTEM, *HELLO, ANSWER, MORE]),
        ask(messages=[SYSTEM, *HELLO, ANSWER, MORE, ANSWER, MORE]),
    )
    assert first == second == third
    assert first.parent is None


def test_the_same_request_again_is_the_same_trajectory() -> None:
    first, second = trajectories(ask(), ask())
    assert first == second


def test_a_fork_is_a_child() -> None:
    root, _, fork, again = trajectories(
        ask(),
        ask(messages=[*HELLO, ANSWER, MORE]),
        ask(messages=[*HELLO, {"role": "assistant", "content": "other"}, MORE]),
        ask(messages=[*HELLO, {"role": "assistant", "content": "other"}, MORE, ANSWER, MORE]),
    )
    assert fork.id != root.id
    assert fork.parent == root.id
    assert again.id == fork.id


def test_a_shared_system_message_is_no_kinship() -> None:
    first, second = trajectories(ask(messages=[SYSTEM, *HELLO]), ask(messages=[SYSTEM, MORE]))
    assert first.id != second.id
    assert second.parent is None


@pytest.mark.parametrize("other", [{"tools": [{"function": {"name": "f"}}]}, {"user": "someone"}])
def test_other_tools_or_users_are_other_conversations(other: dict[str, Any]) -> None:
    first, second = trajectories(ask(), ask(**other))
    assert first.id != second.id
    assert second.parent is None


def test_a_conversation_with_an_id_goes_on_without_it() -> None:
    worker = ScriptedWorker()

    async def run() -> None:
        async with client_of(worker) as client:
            await client.post(CHAT, json=ask(), headers={"x-agentspec-trajectory": "mine"})
            await client.post(CHAT, json=ask(messages=[*HELLO, ANSWER, MORE]))
            last = {"x-agentspec-final": "true"}
            await client.post(CHAT, json=ask(messages=[*HELLO, ANSWER, MORE, ANSWER, MORE]), headers=last)
            await client.post(CHAT, json=ask(messages=[*HELLO, ANSWER, MORE, ANSWER, MORE, ANSWER, MORE]))

    asyncio.run(run())
    ids = [request.trajectory.id for request in worker.requests]
    assert ids[:3] == ["mine"] * 3
    assert worker.requests[3].trajectory.parent == "mine"


def test_prx_14_fields_of_a_namespace_cannot_be_shifted() -> None:
    assert prefix_digests(["org_1", "2345"], None, HELLO) != prefix_digests(["org_12345", ""], None, HELLO)


def test_the_memory_is_bounded_and_forgets_the_least_recent() -> None:
    chain = Chain(capacity=4)
    talks = [
        prefix_digests([], None, [{"role": "user", "content": f"{talk}.{turn}"} for turn in range(2)])
        for talk in range(3)
    ]
    chain.learn(talks[0], "a")
    chain.learn(talks[1], "b")
    chain.learn(talks[0], "a")
    chain.learn(talks[2], "c")
    assert len(chain) == 4
    assert chain.find(talks[0]) == Match("a", continues=True)
    assert chain.find(talks[1]) is None
