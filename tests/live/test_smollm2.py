"""SmolLM2-135M from the model cache: drafts change no token, whoever decodes beside us."""

from pathlib import Path

import pytest

from agentspec.config import load
from agentspec.engine.models import ensure, ready

pytestmark = [pytest.mark.live, pytest.mark.slow]

NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def folder() -> Path:
    if ready(NAME, load().model.home) is None:
        pytest.skip(f"needs: agentspec models pull {NAME}")
    return ensure(NAME, load().model.home)


def test_drafts_change_no_token_of_recorded_turns(folder: Path) -> None:
    from bench import parity

    options = parity.parser().parse_args(["--turns", "6", "--sampled-turns", "2", "--tokens", "32"])
    greedy, *sampled = parity.run(options)
    assert [difference for way in (greedy, *sampled) for difference in way.differences] == []
    assert greedy.turns == greedy.same_off == greedy.same_transformers == 6
    assert [way.same_off for way in sampled] == [2, 2, 2]
    assert greedy.accepted > 0 and greedy.steps_on < greedy.steps_off == greedy.tokens


def test_clients_at_once_get_what_each_gets_alone(folder: Path) -> None:
    from bench import concurrency

    options = concurrency.parser().parse_args(["--clients", "3", "--turns", "2", "--tokens", "16"])
    found = concurrency.run(options)
    assert found["same_tokens"]
    assert [arm["tokens"] for arm in found["arms"]] == [found["arms"][0]["tokens"]] * 4
