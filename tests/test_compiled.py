"""Compiled code is kept where that works, and missed without harm where it does not."""

import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest

from agentspec import compiled as compiled_module
from tests.full_disk import full_disk

SOURCE = "from agentspec.compiled import compiled\n\n\n@compiled\ndef twice(x):\n    return x + x\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of one kernel, whose code is kept in `kept` beside it."""
    path = tmp_path / "kernels" / "one.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    compiled_module.warn_once.cache_clear()
    return path


def imported(path: Path) -> Any:
    """The module, as a process that starts anew would have it."""
    spec = importlib.util.spec_from_file_location("one", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.twice


def kept(path: Path) -> list[Path]:
    return sorted(file for file in (path.parents[1] / "kept").rglob("*.nb*") if file.is_file())


def test_code_is_kept_for_the_next_process(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agentspec.compiled")
    compiled_module.tell_once.cache_clear()
    assert imported(source)(4) == 8
    assert [record.getMessage()[:17] for record in caplog.records] == ["compiling kernels"]
    compiled_module.tell_once.cache_clear()
    assert [file.suffix for file in kept(source)] == [".nbc", ".nbi"]
    again = imported(source)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1
    assert len(caplog.records) == 1, "nothing was compiled"


def test_a_full_disk_costs_nothing_but_compiling(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    with full_disk():
        assert imported(source)(4) == 8
    assert kept(source) == []
    assert imported(source)(2.5) == 5.0
    assert len(caplog.records) == 1 and "cannot be kept" in caplog.text


def test_no_folder_that_can_be_written(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = source.parent / "file"
    nowhere.write_text("")
    (source.parent / "__pycache__").write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(nowhere / "kept"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert imported(source)(4) == imported(source)(4) == 8
    assert len(caplog.records) == 1 and "NUMBA_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("spoil", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"junk" * 9])
def test_spoiled_files_are_compiled_and_kept_again(
    source: Path, suffix: str, spoil: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    assert imported(source)(4) == 8
    (file,) = [file for file in kept(source) if file.suffix == suffix]
    file.write_bytes(spoil(file.read_bytes()))
    assert imported(source)(4) == 8
    assert "cannot be read" in caplog.text
    assert all(entry.levelno == logging.WARNING for entry in caplog.records)
    again = imported(source)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1
    assert len(caplog.records) == 1, "nothing was compiled"
