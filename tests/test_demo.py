"""The demonstration of `agentspec serve --demo`, on a real server with a scripted worker."""

import asyncio

import pytest

from agentspec.commands.demo import OPTIONS, RUNS, demonstrate
from agentspec.config import ServerConfig
from agentspec.errors import InternalError
from agentspec.server.run import serve_in_thread
from tests.server.conftest import ScriptedWorker


def test_the_demonstration_replays_both_runs_in_both_arms(capsys: pytest.CaptureFixture[str]) -> None:
    worker = ScriptedWorker()
    with serve_in_thread(worker, ServerConfig()) as url:
        asyncio.run(demonstrate(url))
    text = capsys.readouterr().out
    assert all(run in text for run in RUNS)
    assert "Identical output: 8 of 8 turns." in text
    assert [request.speculation.enabled for request in worker.requests].count(True) == 8
    assert {request.max_tokens for request in worker.requests} == {OPTIONS.max_tokens}
    assert len(worker.requests) == 16


def test_a_failing_demonstration_is_told_and_not_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_in_thread(ScriptedWorker(failure=InternalError("broken")), ServerConfig()) as url:
        asyncio.run(demonstrate(url))
    text = capsys.readouterr().out
    assert "The demonstration failed: recorded/inventory-reservations, messages[2]" in text
    assert text.endswith("The server keeps serving.\n")


def test_a_server_that_is_gone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_in_thread(ScriptedWorker(), ServerConfig()) as url:
        pass
    asyncio.run(demonstrate(url))
    assert "The demonstration failed" in capsys.readouterr().out
