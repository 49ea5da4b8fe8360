import os
from pathlib import Path

import pytest

from agentspec.engine.cores import usable_cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", 4), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("900000 100000", 4)],
)
def test_a_containers_share_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6}, raising=False)
    quota = tmp_path / "cpu.max"
    quota.write_text(text + "\n")
    assert usable_cores(quota) == cores


@pytest.mark.parametrize("text", ["", "junk", "1 0", "x y"])
def test_a_share_that_cannot_be_read_bounds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3}, raising=False)
    quota = tmp_path / "cpu.max"
    assert usable_cores(quota) == 2
    quota.write_text(text)
    assert usable_cores(quota) == 2
