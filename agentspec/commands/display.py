"""Progress on standard error: bars on a terminal, else a line now and then."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

EVERY_S = 30.0
"""Seconds between lines about the same work."""


@contextlib.contextmanager
def model_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows what is done to a model: a bar in bytes where there are bytes, else what is being done; where there is no
    terminal, the log says once what is being done."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
                if not console.is_terminal:
                    log.info("%s", what)
            counted = total if total > 1 else None
            bars.update(tasks[what], completed=done if counted or done == 0 else 1, total=counted or done or None)

        yield show


@contextlib.contextmanager
def turn_progress() -> Iterator[Callable[[int, int], None]]:
    """Shows how many turns are done; where there is no terminal, in a line now and then."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        task = bars.add_task("turns")
        told = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal told
            bars.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - told >= EVERY_S:
                told = time.monotonic()
                console.print(f"{done} of {total} turns done", highlight=False)

        yield show
