"""The kernels compile for GPUs that are not there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KERNELS = {
    "append_rows", "attend_part", "best_of_part", "best_of_row", "choose_tokens", "compact_path", "join_parts",
    "walk_tree",
}  # fmt: skip


@pytest.mark.slow
def test_every_kernel_compiles_and_its_default_fits() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.triton.compiled"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert {line.split(":")[0] for line in made.stdout.splitlines()} == KERNELS
