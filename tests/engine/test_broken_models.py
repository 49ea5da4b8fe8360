"""Model files that are damaged, foreign or cannot be written: one named error, and nothing half-made."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig, Config, ModelConfig
from agentspec.engine import convert
from agentspec.engine.manifest import is_complete
from agentspec.engine.models import ensure
from agentspec.engine.service import Engine
from agentspec.errors import ModelError
from tests.full_disk import full_disk

JUNK: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "binary": lambda data: bytes(range(256)) * 4,
    "cut": lambda data: data[: len(data) // 2],
    "a list": lambda data: b"[]",
    "a number": lambda data: b"1",
    "empty object": lambda data: b"{}",
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("junk", JUNK)
def test_a_folder_with_a_damaged_file_is_named_or_served(
    tiny_model: Path, tmp_path: Path, file: str, junk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    path = folder / file
    path.write_bytes(JUNK[junk](path.read_bytes()))

    def loaded(*_: Any) -> None:
        raise AllLoaded

    monkeypatch.setattr(Engine, "__init__", loaded)
    config = Config(model=ModelConfig(name=str(folder)))
    with pytest.raises((ModelError, AllLoaded)) as raised:
        Engine.from_folder(config, ensure(str(folder), tmp_path / "home"), Histories(CacheConfig()))
    if raised.type is ModelError:
        assert str(folder) in str(raised.value) or "model" in str(raised.value)
    else:
        assert file in ("generation_config.json", "tokenizer_config.json")


class AllLoaded(Exception):
    """The files were good enough."""


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": 1}', b'{"weight_map": []}', b"\xff\xfe", b"1"])
def test_a_damaged_list_of_shards_is_named(tiny_model: Path, tmp_path: Path, index: bytes) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: not a list of weight files"):
        ensure(str(folder), tmp_path / "home")


@pytest.mark.parametrize("manifest", [b"", b"\xff", b"[]", b"{}", b'{"format": 1}', b'{"format": 1, "files": []}'])
def test_a_damaged_manifest_is_none(tmp_path: Path, manifest: bytes) -> None:
    (tmp_path / "agentspec.json").write_bytes(manifest)
    assert not is_complete(tmp_path)


HEAD = struct.pack("<4sIQQ", b"GGUF", 3, 1, 1)
GGUFS: dict[str, bytes] = {
    "nothing": b"",
    "text": b"hello",
    "magic alone": b"GGUF",
    "cut after the head": HEAD,
    "another version": struct.pack("<4sIQQ", b"GGUF", 99, 0, 0),
    "no fields": struct.pack("<4sIQQ", b"GGUF", 3, 0, 0),
    "a key of exabytes": HEAD + struct.pack("<Q", 2**62),
    "an unknown type": HEAD + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77) + b"\0" * 64,
    "zeros": HEAD + b"\0" * 4096,
}


@pytest.mark.parametrize("name", GGUFS)
def test_a_gguf_file_that_is_none_is_named_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    file, home = tmp_path / "model.gguf", tmp_path / "home"
    file.write_bytes(GGUFS[name])
    with pytest.raises(ModelError, match=r"model\.gguf"):
        ensure(str(file), home)
    assert [path for path in (home / "models").iterdir() if not path.name.endswith(".lock")] == []


STEPS = ("save_weights", "save_config", "save_tokenizer")


@pytest.mark.parametrize("failing", STEPS)
def test_a_full_disk_while_a_model_is_converted_is_told(
    tiny_model: Path, tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    for step in STEPS:
        if step != failing:
            monkeypatch.setattr(convert, step, lambda *_: None)

    def converted(source: Path, folder: Path) -> None:
        with full_disk():
            convert.save_model(model, tokenizer, folder, source)

    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"File too large"):
        ensure(str(file), tmp_path / "home", convert=converted)
    left = [path for path in (tmp_path / "home" / "models").iterdir() if not path.name.endswith(".lock")]
    assert left == []
