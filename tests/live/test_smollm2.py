"""SmolLM2-135M from the model cache: drafts change no token, whoever decodes beside us."""

import json
from pathlib import Path

import pytest

from agentspec.cli import main
from agentspec.config import load
from agentspec.engine.models import ensure, ready

pytestmark = [pytest.mark.live, pytest.mark.slow]

NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def folder() -> Path:
    if ready(NAME, load().model.home) is None:
        pytest.skip(f"needs: agentspec models pull {NAME}")
    return ensure(NAME, load().model.home)


def test_drafts_change_no_bit_of_recorded_turns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--turns 6 --sampled-turns 2 --max-tokens 32 --at-once 1 3 --transformers --json"
    assert main(["parity", "--model", NAME, *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("identical: the same tokens, from the same bits of every logit, in 24 of 24")
    greedy = found["comparisons"][0]
    assert greedy["identical_to_transformers"] == greedy["turns"] == 6
    assert greedy["accepted"] > 0
    assert greedy["steps_on"] < greedy["steps_off"] == greedy["tokens"]


def test_clients_at_once_get_what_each_gets_alone(folder: Path) -> None:
    from bench import concurrency

    options = concurrency.parser().parse_args(["--clients", "3", "--turns", "2", "--tokens", "16"])
    found = concurrency.run(options)
    assert found["same_tokens"]
    assert [arm["tokens"] for arm in found["arms"]] == [found["arms"][0]["tokens"]] * 4
