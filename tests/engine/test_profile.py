"""What passes cost is measured once for a target and a device, and kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.config import Config, Dtype, ModelConfig
from agentspec.engine.profile import cost_table, stored_cost_table
from agentspec.engine.service import profile_of
from agentspec.policies.cost import CostTable


class Counted:
    """Measures, and counts how often it did."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, target: Any) -> CostTable:
        self.times += 1
        return cost_table(target, rounds=1)


def test_a_second_start_reads_what_the_first_one_measured(harness: Any, tmp_path: Path) -> None:
    counted = Counted()
    file = tmp_path / "new" / "folder" / "tiny.json"
    first = stored_cost_table(harness.target, file, counted)
    assert stored_cost_table(harness.target, file, counted) == first
    assert counted.times == 1
    assert [path.name for path in file.parent.iterdir()] == ["tiny.json"]


def changed(file: Path, change: dict[str, Any], part: str) -> None:
    content = json.loads(file.read_text())
    content[part] |= change
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        ("device", {"processor": "another"}),
        ("device", {"threads": 77}),
        ("device", {"code": "older"}),
        ("table", {"milliseconds": [[1, 2, 3, 4, -5], [1, 2, 3, 4, 5]]}),
        ("table", {"milliseconds": [[1, 2, 3, 4, float("nan")], [1, 2, 3, 4, 5]]}),
        ("table", {"milliseconds": [[1, 2], [3]]}),
        ("table", {"contexts": [256], "milliseconds": [[1, 2, 3, 4, 5]]}),
        ("table", {"rows": None}),
        b"",
        b"[]",
        b"{",
        b"\xff\x00",
    ],
    ids=str,
)
def test_what_is_of_another_device_or_spoiled_is_measured_again(harness: Any, tmp_path: Path, change: Any) -> None:
    file = tmp_path / "tiny.json"
    stored_cost_table(harness.target, file, Counted())
    if isinstance(change, bytes):
        file.write_bytes(change)
    else:
        changed(file, change[1], change[0])
    counted = Counted()
    table = stored_cost_table(harness.target, file, counted)
    assert counted.times == 1
    assert table == stored_cost_table(harness.target, file, counted)
    assert counted.times == 1


def test_where_nothing_can_be_kept_it_is_measured_all_the_same(
    harness: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    assert stored_cost_table(harness.target, blocked / "tiny.json")(1, 100) > 0
    assert "measured again at the next start" in caplog.text


def test_models_and_numbers_have_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "b" / "model").mkdir(parents=True)
    names = [str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model"), "hub/model", "smollm2-135m", "."]
    files = {
        profile_of(Config(model=ModelConfig(name=name, home=tmp_path, dtype=dtype)))
        for name in names
        for dtype in Dtype
    }
    assert len(files) == len(names) * len(Dtype)
    assert all(file.parent == tmp_path / "profiles" for file in files)
