"""Copies of damaged history files: kept beside the file for whoever wants to save something, and part of a deletion."""

import mmap
import stat
import time
from pathlib import Path

from agentspec.cache.codec import names_of
from agentspec.types import Trajectory


def fresh(path: Path) -> Path:
    """A name for a copy of a history file."""
    return path.with_name(f"{path.name}.damaged-{time.time_ns()}")


def copies(path: Path) -> list[Path]:
    """The copies beside a history file."""
    found = (entry for entry in path.parent.iterdir() if entry.name.startswith(f"{path.name}.damaged-"))
    return sorted(entry for entry in found if stat.S_ISREG(entry.lstat().st_mode))


def remove_naming(path: Path, trajectory: Trajectory) -> int:
    """Remove the copies in which a trajectory's name can be read; how many they were. Raises `OSError`."""
    found = [copy for copy in copies(path) if names(copy, trajectory)]
    for copy in found:
        copy.unlink()
    return len(found)


def names(copy: Path, trajectory: Trajectory) -> bool:
    """Whether a file has a trajectory's names one after the other, as a record has them."""
    with copy.open("rb") as file:
        if not copy.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"".join(names_of(trajectory))) >= 0
