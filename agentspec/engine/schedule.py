"""Who runs: admission by priority and age, preemption that loses nothing, and the prompt tokens of a pass."""

import logging
from collections.abc import Callable, Sequence

from agentspec.engine.job import Job
from agentspec.engine.prefix import KVPool, Owner
from agentspec.errors import InternalError

log = logging.getLogger(__name__)

GUARANTEED = 4
"""The oldest prompt gets at least this part of a pass's prompt tokens, one in so many, however short others are."""


def rank(job: Job) -> tuple[int, float]:
    """Order in which jobs are served: by priority, lower first, then by age."""
    return job.request.priority, job.clock.submitted


def shares(jobs: Sequence[Job], wanted: Sequence[int], budget: int) -> list[int]:
    """How many of the tokens that it wants to compute each prefilling job gets of the next pass's `budget`.

    Short prompts come first within a priority, so that they need not wait for long ones; the job that is first by
    `rank` gets its guaranteed part all the same.
    """
    given = [0] * len(jobs)
    if not jobs:
        return given
    first = min(range(len(jobs)), key=lambda i: rank(jobs[i]))
    given[first] = min(wanted[first], max(1, budget // GUARANTEED))
    left = budget - given[first]
    for i in sorted(range(len(jobs)), key=lambda i: (jobs[i].request.priority, wanted[i], rank(jobs[i]))):
        more = min(wanted[i] - given[i], left)
        given[i] += more
        left -= more
    return given


class Scheduler:
    """The jobs of an engine and their memory. One thread owns it; only `Job.cancelled` is set by others."""

    def __init__(self, pool: KVPool, max_running: int) -> None:
        self.pool = pool
        self.max_running = max_running
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.preemptions = 0

    def admit(self, start: Callable[[Job], None], fail: Callable[[Job], None]) -> None:
        """Let waiting jobs run while there are places and memory; where there are none, jobs of lower priority give
        theirs up. `start` is called with every job that got one, `fail` with one that cannot."""
        while self.waiting:
            job = min((job for job in self.waiting if not self._is_led(job)), key=rank, default=None)
            if job is None:
                return
            try:
                if not self._finds_place(job):
                    return
                self.waiting.remove(job)
                self._run(job, start)
            except Exception:
                log.exception("a request could not be started; the others go on")
                self.waiting = [other for other in self.waiting if other is not job]
                fail(job)

    def _is_led(self, job: Job) -> bool:
        """Whether another job is about to compute the job's prompt."""
        leader = job.leader
        return leader is not None and (leader in self.waiting or (leader in self.running and leader.prefilling))

    def _finds_place(self, job: Job) -> bool:
        """Whether there is a place, or can be: then as few as are needed give theirs up, the last by `rank` first."""
        lower = [other for other in self.running if other.request.priority > job.request.priority]
        lower.sort(key=rank, reverse=True)
        for count in range(len(lower) + 1):
            leaving = [other.holding for other in lower[:count] if other.holding is not None]
            place = len(self.running) - count < self.max_running
            if place and self.pool.admits(job.scope, job.tokens, leaving):
                for other in lower[:count]:
                    self.preempt(other)
                return True
        return False

    def _run(self, job: Job, start: Callable[[Job], None]) -> None:
        job.holding = self.pool.acquire(job.scope, job.reusable)
        self.running.append(job)
        start(job)

    def preempt(self, job: Job) -> None:
        """Back to the waiting ones: all that was said is kept, and what was computed too while memory lasts."""
        log.info("a request of %d tokens gives its place up for a while", len(job.tokens))
        self.leave(job)
        self.preemptions += 1
        self.waiting.append(job)

    def leave(self, job: Job) -> None:
        """Give a running job's place and memory back."""
        assert job.holding is not None
        self.running.remove(job)
        self.pool.release(job.holding, job.tokens, job.owner)
        job.holding = None
        if job.forgotten:
            self.pool.forget(job.owner)

    def forget(self, owner: Owner) -> bool:
        """A trajectory was deleted: its pages go, those of its running jobs when they leave; whether it had any."""
        jobs = [job for job in (*self.running, *self.waiting) if job.owner == owner]
        for job in jobs:
            job.forgotten = True
        return self.pool.forget(owner) or bool(jobs)

    def make_room(self) -> None:
        """One more row for every running job, first come first served; who gets none waits again."""
        for job in sorted(self.running, key=rank):
            while job.holding is not None and not self.pool.grow(job.holding, job.computed + 1):
                last = max(self.running, key=rank)
                if len(self.running) == 1:
                    raise InternalError("the memory for keys and values does not hold one request")
                self.preempt(last)

    def rows(self, job: Job, wanted: int) -> int:
        """How many of the wanted rows there is memory for, at least one after `make_room`."""
        assert job.holding is not None
        self.pool.grow(job.holding, job.computed + wanted)
        return min(wanted, job.holding.table.capacity - job.computed)

    def drop_cancelled(self) -> None:
        """Cancelled jobs leave."""
        for job in [job for job in self.running if job.cancelled]:
            self.leave(job)
        self.waiting = [job for job in self.waiting if not job.cancelled]
