"""Block sizes are timed once, kept for the device, and measured anew where the file is of no use."""

import logging
from math import inf
from pathlib import Path

import pytest

from agentspec.kernels.triton.blocks import Blocks, BlockTable

FIRST, SECOND, THIRD = Blocks(16, 16, 256), Blocks(32, 16, 256), Blocks(64, 64, 1024, 8, 3)
COSTS = {FIRST: 3.0, SECOND: 1.5, THIRD: inf}


def test_the_quickest_is_picked_once_and_kept(tmp_path: Path) -> None:
    table = BlockTable(tmp_path, "NVIDIA H200 (SXM)")
    assert table.pick("a shape", list(COSTS), COSTS.__getitem__) == SECOND
    again = BlockTable(tmp_path, "NVIDIA H200 (SXM)")
    assert again.choices == {"a shape": SECOND}
    assert again.pick("a shape", [FIRST], lambda blocks: 1 / 0) == SECOND
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-h200-sxm.json"]
    assert BlockTable(tmp_path, "another").choices == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 1, "choices": {"a": {"rows": 1}}}'])
def test_a_file_of_no_use_is_said_in_the_log(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "gpu.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert BlockTable(tmp_path, "gpu").choices == {}
    assert "measured anew" in caplog.text


def test_a_table_of_another_version_is_measured_anew(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text('{"version": 0, "choices": {}}')
    table = BlockTable(tmp_path, "gpu")
    assert table.pick("a shape", [FIRST], COSTS.__getitem__) == FIRST


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    table = BlockTable(tmp_path / "file", "gpu")
    assert table.pick("a shape", [FIRST, SECOND], COSTS.__getitem__) == SECOND
    assert "not kept" in caplog.text
