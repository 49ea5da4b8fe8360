"""The small file beside a converted model that says what it was made of and what belongs to it."""

import hashlib
import json
from pathlib import Path
from typing import Any

MANIFEST = "agentspec.json"
FORMAT = 1


def digest(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, source: dict[str, Any]) -> None:
    """Lists every file of a finished folder with its size and hash. Written last: with it the folder is complete."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    content = {"format": FORMAT, "source": source, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None when there is none, or none that this version understands."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    known = isinstance(content, dict) and content.get("format") == FORMAT and isinstance(content.get("files"), dict)
    return content if known else None


def is_complete(folder: Path) -> bool:
    """Whether a folder has a manifest and every file of it in full size."""
    content = read_manifest(folder)
    if content is None:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry["bytes"]
        for name, entry in content["files"].items()
    )


def damaged_files(folder: Path) -> list[str]:
    """Names of the manifest's files whose content is not what was written; reads all of them."""
    content = read_manifest(folder) or {"files": {}}
    return [
        name
        for name, entry in content["files"].items()
        if not (folder / name).is_file() or digest(folder / name) != entry["sha256"]
    ]
