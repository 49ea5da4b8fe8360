"""Threads that run one compiled function together, in step."""

from agentspec.compiled import compiled
from agentspec.kernels.cpu.lanes import fetch_add, give_way, read, relax, write

PATIENCE = 4000
"""Looks at a barrier before the thread lets others run: a thread that waits long waits for one without a core."""

ARRIVED, ROUND = 0, 64
"""Where a barrier's words lie, in bytes: apart, so that waiting does not slow the arriving down."""

SYNC_WORDS = 32
"""int64 that a barrier takes."""


@compiled
def meet(sync: int, threads: int) -> None:
    """Returns once all threads have called it; each sees what the others wrote before."""
    if threads == 1:
        return
    this = read(sync + ROUND)
    if fetch_add(sync + ARRIVED, 1) == threads - 1:
        write(sync + ARRIVED, 0)
        write(sync + ROUND, this + 1)
        return
    looks = 0
    while read(sync + ROUND) == this:
        relax()
        looks += 1
        if looks > PATIENCE:
            give_way()
