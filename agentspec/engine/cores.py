"""How many threads can work at the same time here."""

import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Linux: microseconds of processor time and the period they are for; `max` for no limit."""


def usable_cores(quota: Path = QUOTA) -> int:
    """Processors that this process may run on, or fewer where its container has a smaller share of time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = quota.read_text().split()
        return max(1, min(allowed, math.floor(int(time) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):
        return allowed
