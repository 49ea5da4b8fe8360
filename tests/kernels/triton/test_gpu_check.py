"""The command that checks a GPU works where there is none: in the interpreter, and by saying so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu_check import main

ROOT = Path(__file__).resolve().parents[3]


def test_all_checks_hold_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert main(["--interpret", "--output", str(tmp_path / "out.json")]) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["ok"] and document["interpreted"] and "triton" in document["versions"]
    kernels = {check["kernel"] for check in document["checks"]}
    assert kernels == {
        "tree attention", "tree attention in parts", "append", "compaction", "walk", "argmax", "inverse CDF",
        "top-k ids", "top-k log-probabilities", "greedy decoding", "seeded decoding",
        "greedy engine",
    }  # fmt: skip
    right = [check for check in document["checks"] if check["case"] == "right drafts"]
    assert len(right) == 3 and all(check["steps"] < check["steps_plain"] for check in right)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "found none" in said


@pytest.mark.slow
def test_it_chooses_the_interpreter_before_triton_is_imported() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-c", "import sys, bench.gpu_check; sys.exit('triton' in sys.modules)"]
    assert subprocess.run(command, check=False, cwd=ROOT).returncode == 0
