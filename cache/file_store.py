"""Histories in memory with a file that survives the process: every write is appended, and now and then it is rewritten.

Memory is what counts: where the file cannot follow, because the disk is full or slow, histories go on in memory, and
the file is written anew from them later.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from agentspec.cache import damaged
from agentspec.cache.automaton import Int32s
from agentspec.cache.index import Tokens
from agentspec.cache.journal import SETTING, Found, Journal, Record, encode, file_at, in_parts, no_space, read
from agentspec.cache.store import MemoryStore, Stored
from agentspec.config import CacheConfig
from agentspec.errors import ConfigError
from agentspec.types import Scope, Trajectory

log = logging.getLogger(__name__)

PENDING_BYTES = 16 * 1024**2
"""Bytes that may wait for the disk; beyond them the file is written anew."""

SPARE_BYTES = 1024**2
"""A file may be so much larger than twice what is in memory before it is written anew."""

RETRY_S = 30.0
FLUSH_S = 5.0


class FileStore(MemoryStore):
    """A `HistoryStore` on a file of this process alone. Belongs to one event loop."""

    def __init__(self, config: CacheConfig, clock: Callable[[], float] = time.time) -> None:
        super().__init__(
            min(config.memory_bytes // 8, max(config.history_file_bytes - SPARE_BYTES, 0) // 2),
            config.trajectory_tokens,
            scope_bytes=config.scope_bytes,
            ttl_s=config.ttl_s,
            clock=clock,
        )
        self.limit = config.history_file_bytes
        self.pending: list[bytes] = []
        self.pending_bytes = 0
        self.stale = False
        """The file has to be written anew."""

        self.held: dict[tuple[Scope, str], int] = {}
        """Trajectories that the file has something of, or is about to, in memory or not; and after how many attempts to
        write it anew that was added."""

        self.retry_at = 0.0
        """By the monotonic clock."""

        self.failures = 0
        self.rewrites = 0
        """Attempts to write the file anew."""

        self.anew = 0
        """Which of them was the last that succeeded."""

        self.worker: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.closed = False
        self.journal = Journal(file_at(config.history_file))
        self.copies = 0
        try:
            self.restore()
        except ConfigError:
            self.journal.close()
            raise
        self.count_copies()

    def restore(self) -> None:
        """Take in what the file holds, and make it fit to be written to."""
        data = self.journal.contents()
        try:
            found = read(data)
        except ValueError:
            aside = self.kept_aside()
            log.error("%s is no file of histories: it is kept as %s, and a new one is begun", self.journal.path, aside)
            return
        self.take_in(found.records)
        if found.whole or found.torn:
            self.cut(found)
        else:
            aside = self.kept_aside()
            self.stale = True
            log.error(
                "%s is damaged from byte %d of %d: what comes before is taken over, the file is kept as %s",
                self.journal.path, found.end, found.size, aside,
            )  # fmt: skip
        if self.stale:
            self.rewrite_now()

    def take_in(self, records: Sequence[Record]) -> None:
        """Fill memory, as far as there is room. What is dated in the future is taken as written now."""
        now = self.clock()
        for record in records:
            known = record.updated <= now
            self.extend(record.trajectory, record.tokens, record.turns, record.updated if known else now)
            self.held[record.trajectory.scope, record.trajectory.id] = 0
            self.stale = self.stale or not known
        self.look_through()
        for scope in list(self.bytes_of):
            self.make_room(scope)

    def rewrite_now(self) -> None:
        """Write the file anew, at the start."""
        try:
            self.journal.rewrite(in_parts(self.begin_anew()))
            self.is_anew()
        except OSError as error:
            self.failed(error)

    def snapshot(self) -> list[tuple[Trajectory, Int32s, int, float]]:
        """All that is in memory now."""
        return [
            (Trajectory(name, scope), entry.tokens, entry.turns, entry.updated)
            for (scope, name), entry in self.kept.items()
        ]

    def cut(self, found: Found) -> None:
        """Cut off a write that was interrupted."""
        if not found.whole:
            log.warning("%s: the last %d bytes were not written whole", self.journal.path, found.size - found.end)
        if found.end < found.size or found.end == 0:
            try:
                self.journal.cut(found.end)
            except OSError as error:
                self.failed(error)

    def kept_aside(self) -> Path:
        """Where a file that cannot be used is kept."""
        try:
            return self.journal.put_aside()
        except OSError as error:
            raise ConfigError(f"{SETTING}: cannot replace {str(self.journal.path)!r}: {error.strerror}") from None

    async def append(self, trajectory: Trajectory, tokens: Tokens) -> None:
        """Add tokens to the end of a trajectory, and to the file a little later."""
        new = self.add(trajectory, tokens)
        if not new.size:
            return
        self.held[trajectory.scope, trajectory.id] = self.rewrites
        if not self.stale:
            self.pending.append(encode(trajectory, new, 1, self.clock()))
            self.pending_bytes += len(self.pending[-1])
            if self.pending_bytes > PENDING_BYTES:
                self.go_stale()
        self.start()

    def evict(self, trajectory: Trajectory) -> None:
        """A trajectory leaves; one that is too old must not stay in the file either."""
        entry = self.kept.get((trajectory.scope, trajectory.id))
        super().evict(trajectory)
        if entry is not None and self.expired(entry):
            self.go_stale()

    async def load(self, trajectory: Trajectory) -> Int32s:
        """The tokens of a trajectory."""
        if self.stale:
            self.start()
        return await super().load(trajectory)

    async def delete(self, trajectory: Trajectory) -> bool | None:
        """Forget a trajectory, and write the file without it before returning; None where that fails, and is tried
        again. Damaged copies of the file in which its name can be read are removed.

        A write that was under way and failed does not count as an attempt.
        """
        asked, key = self.rewrites, (trajectory.scope, trajectory.id)
        known = self.take(trajectory) is not None or key in self.held
        if known:
            self.go_stale()
            self.retry_at = 0.0
            self.start()
        copies = await self.remove_copies(trajectory)
        if known:
            await self.flush()
        if known and self.rewrites == asked:
            self.retry_at = 0.0
            self.start()
            await self.flush()
        if copies is None or (known and self.anew <= asked):
            return None
        return known or copies > 0

    async def remove_copies(self, trajectory: Trajectory) -> int | None:
        """Remove the damaged copies that name a trajectory; how many, None where one stays."""
        try:
            found = await asyncio.to_thread(damaged.remove_naming, self.journal.path, trajectory)
        except OSError as error:
            log.error("a damaged copy of the history file cannot be searched or removed: %s", error)
            return None
        if found:
            log.warning("%d damaged copies of %s named a deleted trajectory and are removed", found, self.journal.path)
            self.count_copies()
        return found

    def count_copies(self) -> None:
        """Note the damaged copies that are beside the file."""
        with suppress(OSError):
            self.copies = len(damaged.copies(self.journal.path))
        if self.copies:
            log.warning("%d damaged copies are beside %s; remove them when you can", self.copies, self.journal.path)

    def go_stale(self) -> None:
        """The file is to be written anew from memory: what waits need not be written."""
        self.stale = True
        self.pending.clear()
        self.pending_bytes = 0

    def start(self) -> None:
        """See that somebody brings the file up to date: now, or after a failure a little later."""
        if self.closed or (self.worker is not None and not self.worker.done()):
            return
        loop, wait = asyncio.get_running_loop(), self.retry_at - time.monotonic()
        if not self.stale or wait <= 0:
            self.worker = loop.create_task(self.work())
            self.worker.add_done_callback(lambda _: self.again())
        elif self.timer is None:
            self.timer = loop.call_later(wait, self.again)

    def again(self) -> None:
        """Start again where the file is behind still."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.stale:
            self.start()

    async def work(self) -> None:
        """Bring the file up to date, as far as the disk lets it."""
        while self.pending or (self.stale and time.monotonic() >= self.retry_at):
            size = self.journal.size + self.pending_bytes
            try:
                if self.stale or size > min(self.limit, 2 * self.bytes + SPARE_BYTES):
                    await self.rewrite()
                else:
                    data = b"".join(self.pending)
                    self.pending.clear()
                    self.pending_bytes = 0
                    await asyncio.to_thread(self.journal.write, data)
            except OSError as error:
                self.failed(error)

    async def rewrite(self) -> None:
        """Write the file anew with what is in memory now; what is added meanwhile follows."""
        await asyncio.to_thread(self.journal.rewrite, in_parts(self.begin_anew()))
        self.is_anew()

    def begin_anew(self) -> list[tuple[Trajectory, Int32s, int, float]]:
        """What the file is to hold; it counts as up to date until writing it fails."""
        self.go_stale()
        self.stale = False
        self.rewrites += 1
        self.held.update(dict.fromkeys(self.kept, self.rewrites))
        return self.snapshot()

    def is_anew(self) -> None:
        """The file was written: what it had before is gone."""
        self.anew = self.rewrites
        self.held = {key: since for key, since in self.held.items() if since == self.anew}

    def failed(self, error: OSError) -> None:
        """The disk took no more: histories go on in memory, and the file is tried again later."""
        self.failures += 1
        self.go_stale()
        self.retry_at = time.monotonic() + RETRY_S
        why = "the disk is full" if no_space(error) else str(error)
        log.error("%s cannot be written, histories go on in memory: %s", self.journal.path, why)

    async def flush(self) -> None:
        """Wait until the file is up to date, but not for long."""
        if self.worker is not None and not self.worker.done():
            await asyncio.wait([self.worker], timeout=FLUSH_S)

    async def close(self) -> None:
        """Bring the file up to date, and let another process have it."""
        if self.closed:
            return
        if self.stale:
            self.retry_at = 0.0
            self.start()
        self.closed = True
        if self.timer is not None:
            self.timer.cancel()
        if self.worker is not None:
            await asyncio.wait([self.worker])
        self.journal.close()
        await super().close()

    async def describe(self, trajectory: Trajectory) -> Stored | None:
        """What is kept of a trajectory, in bytes of the file once that is written anew."""
        stored = await super().describe(trajectory)
        if stored is None:
            return None
        entry = self.kept[trajectory.scope, trajectory.id]
        return replace(stored, bytes=len(encode(trajectory, entry.tokens, entry.turns, entry.updated)))

    def stats(self) -> Mapping[str, float]:
        """What memory holds, and how the file does."""
        return {
            **super().stats(),
            "store_file_bytes": self.journal.size,
            "store_file_rewrites_total": self.rewrites,
            "store_errors_total": self.failures,
            "store_file_behind": int(self.stale),
            "store_file_damaged_copies": self.copies,
        }
