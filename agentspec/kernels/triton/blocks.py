"""Block sizes by shape: timed once on a GPU, kept on disk for each device; fixed elsewhere."""

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median

import torch

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the table's file; a table of another version is measured anew."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a kernel cuts its work."""

    rows: int
    """Rows times heads that a program attends for; a power of two, 16 at least."""

    columns: int
    """Positions that it reads at a time; a power of two, 16 at least."""

    split: int
    """Positions that it reads altogether; a multiple of `columns`."""

    warps: int = 4
    stages: int = 2


class BlockTable:
    """The choices of one device; with a folder, they are read from it and kept in it.

    A choice is made at the first call of its shape, by timing every candidate. That is no work for a CUDA graph: warm
    up before capturing, or the first candidate is taken for this once.
    """

    def __init__(self, folder: Path | None = None, device: str = "") -> None:
        self.path = folder / f"{re.sub('[^A-Za-z0-9]+', '-', device).strip('-').lower()}.json" if folder else None
        self.choices = {} if self.path is None else read_choices(self.path)

    @staticmethod
    def of_this_gpu(home: Path) -> "BlockTable":
        """The table of the current GPU, in a folder of AgentSpec's home."""
        return BlockTable(home / "blocks", torch.cuda.get_device_name())

    def pick(self, shape: str, candidates: Sequence[Blocks], milliseconds: Callable[[Blocks], float]) -> Blocks:
        """The quickest of the candidates for a shape; those that do not fit the device take `inf` milliseconds."""
        if shape not in self.choices:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return candidates[0]
            costs = [milliseconds(blocks) for blocks in candidates]
            self.choices[shape] = candidates[costs.index(min(costs))]
            self.keep()
        return self.choices[shape]

    def keep(self) -> None:
        """Write the table, whole or not at all; a folder that cannot be written is said in the log."""
        if self.path is None:
            return
        document = {"version": VERSION, "choices": {shape: asdict(blocks) for shape, blocks in self.choices.items()}}
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(document, indent=1, sort_keys=True))
            partial.replace(self.path)
        except OSError as error:
            logger.warning("block sizes are not kept: %s", error)


def read_choices(path: Path) -> dict[str, Blocks]:
    """The choices of a table's file; none if there is no such file, or one that cannot be read."""
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text())
        if document["version"] != VERSION:
            return {}
        return {str(shape): Blocks(**blocks) for shape, blocks in document["choices"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("block sizes in %s are measured anew: %s", path, error)
        return {}


def gpu_milliseconds(run: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
    """Median time of a call on the current CUDA stream, by the GPU's clock; `inf` where its kernel does not fit."""
    from triton.runtime.errors import OutOfResources

    try:
        for _ in range(warm_up):
            run()
    except OutOfResources:
        return inf
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return median(times)
