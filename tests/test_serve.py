"""`agentspec serve` as a process: what it says from start to stop."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_model_that_is_here_is_loaded_not_fetched_and_the_end_is_told(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentspec.cli", "serve", "--model", str(tiny_model), "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            serving = process.stdout.readline()
            url = serving.split()[3]
            assert httpx.get(url + "/models").json()["data"][0]["id"] == "tiny"
            process.send_signal(signal.SIGINT)
            assert process.stdout.read().splitlines()[-1] == "Stopped."
            assert process.wait(20) == 0
        finally:
            process.kill()
    text = log.read_text()
    assert f"loading {tiny_model}\n" in text
    assert not re.search("fetch|download|convert|Traceback|ERROR", text)
