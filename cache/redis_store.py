"""Histories in Redis, shared by every process that uses the same one.

Keys (see `codec`): `as:{tenant:model:trajectory}:tok` is a list of chunks, `:meta` a hash of what is in it, `:gone` the
mark of a deletion; `as:{tenant:model}:recent` a sorted set of trajectories by the time of their last write, `:sizes` a
hash of their bytes, `:gone` a sorted set of digests of deleted ones. All expire. Every change is a Lua script.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import (
    CHUNK_TOKENS,
    VERSION,
    Chunk,
    Keys,
    ScopeKeys,
    digest_of,
    identity_of,
    join,
    newer,
    pack,
    storable,
    unpack,
)
from agentspec.cache.index import Tokens
from agentspec.cache.outbox import Kind, Outbox, Write
from agentspec.cache.redis_calls import READERS, WRITE_S, Calls, ended
from agentspec.cache.redis_client import connect
from agentspec.cache.store import Changes, Stored
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory

logger = logging.getLogger(__name__)

MAX_CHUNKS = 1024
"""Chunks kept of a trajectory, the newest."""

MAX_RECENT = 1024
"""Trajectories kept of a scope, the newest."""

MAX_CHANGED = 64
"""Trajectories told of in one answer about changes."""

MAX_PLACES = 10_000
"""Trajectories of which this process knows where it stands in them."""

ANY_VERSION = 255
REFUSAL_S = 60
"""How long after a deletion writes of other processes that continue the deleted trajectory are refused."""

WRITERS = 8
"""Writes to one server at a time."""

OUTBOX_BYTES = 16 * 1024**2
FLUSH_S = 1.0
PAUSE_S = 0.25
"""Wait after a write failed."""

WRITE_TRIES = 3
TAG_SHIFT = 39
"""Bits of a chunk's id that are random; those above are its writer's."""


COUNTED = (
    "appends", "appended", "appended_tokens", "refused", "gone", "newer_left", "newer_read", "unreadable", "evicted",
)  # fmt: skip
"""Writes that were queued; those of them that were stored, and their tokens; those that were not, as they are no
tokens, continue a deleted trajectory or belong to one of a newer version (all others are dropped, withdrawn or wait).
Chunks of a newer version and damaged ones that were read. Trajectories that left for their scope's limit."""


@dataclass(slots=True)
class Place:
    """Where this process stands in a stored trajectory."""

    end: int = 0
    """Id of the chunk that it read or queued last."""

    seen: bytes = b""
    """Id of the last chunk that it read."""


class RedisStore:
    """A `HistoryStore`. Nothing connects before the first call; belongs to one event loop."""

    shared = True

    def __init__(
        self, config: CacheConfig, clock: Callable[[], float] = time.monotonic, outbox_bytes: int = OUTBOX_BYTES
    ) -> None:
        self.config = config
        self.calls = Calls(connect(config, READERS + WRITERS + 4), config.deadline_ms / 1000, clock)
        self.outbox = Outbox(outbox_bytes)
        self.reserved_bytes = outbox_bytes
        self.places: OrderedDict[str, Place] = OrderedDict()
        self.deleting: Counter[str] = Counter()
        """Trajectories whose deletion is not done yet, and how often each."""

        self.writers: dict[str, asyncio.Task[None]] = {}
        self.tag = secrets.randbits(24) | 1
        self.counts = dict.fromkeys(COUNTED, 0)

    async def append(self, trajectory: Trajectory, tokens: Tokens) -> None:
        """Queue tokens to be added to the end of a trajectory."""
        try:
            array = np.asarray(tokens, np.int32).reshape(-1)
        except (OverflowError, TypeError, ValueError):
            self.counts["refused"] += 1
            return
        if not storable(trajectory) or array.min(initial=0) < -1:
            self.counts["refused"] += 1
        elif array.size:
            self.counts["appends"] += 1
            self.put(self.appending(trajectory, array))

    def appending(self, trajectory: Trajectory, tokens: Int32s) -> Write:
        """The write of tokens in chunks that continue what this process read or wrote last of a trajectory."""
        place = self.place(Keys.of(trajectory).tokens)
        chunks = []
        for start in range(0, tokens.size, CHUNK_TOKENS):
            identity = self.tag << TAG_SHIFT | secrets.randbits(TAG_SHIFT)
            chunks.append(pack(trajectory, Chunk(identity, place.end, tokens[start : start + CHUNK_TOKENS])))
            place.end = identity
        return Write(trajectory, Kind.APPEND, tuple(chunks), tokens.size, str(place.end))

    def place(self, key: str) -> Place:
        """Where this process stands in a trajectory, now the most recently used."""
        place = self.places.setdefault(key, Place())
        self.places.move_to_end(key)
        if len(self.places) > MAX_PLACES:
            self.places.popitem(last=False)
        return place

    async def load(self, trajectory: Trajectory) -> Int32s:
        """The tokens of a trajectory; empty when there are none or they do not come within the deadline."""
        chunks = await self.chunks(trajectory, b"")
        place = self.place(Keys.of(trajectory).tokens)
        if chunks and not place.end:
            place.end = chunks[-1].id
        return join(chunks)[-self.config.trajectory_tokens :]

    async def news(self, trajectory: Trajectory) -> Int32s:
        """What other processes added to a trajectory since it was read last."""
        chunks = await self.chunks(trajectory, self.place(Keys.of(trajectory).tokens).seen)
        return join(chunk for chunk in chunks if chunk.id >> TAG_SHIFT != self.tag)

    async def chunks(self, trajectory: Trajectory, after: bytes) -> list[Chunk]:
        """The readable chunks of a trajectory behind a known one, in one round trip; none while it is being deleted or
        when that began meanwhile."""
        key = Keys.of(trajectory).tokens
        if not storable(trajectory) or self.deleting[key] > 0:
            return []
        place = self.place(key)
        read = await self.calls.read(key, lambda: self.calls.eval("open", [key], after, MAX_CHUNKS))
        stored: list[bytes] = read or []
        if not stored or self.places.get(key) is not place:
            return []
        place.seen = identity_of(stored[-1])
        chunks = [unpack(trajectory, data) for data in stored]
        readable = [chunk for chunk in chunks if chunk is not None]
        of_later = sum(newer(data) for data in stored)
        self.counts["newer_read"] += of_later
        self.counts["unreadable"] += len(chunks) - len(readable) - of_later
        if of_later:
            logger.warning("a newer AgentSpec wrote a history in the store; it is not read and left as it is")
        return readable

    async def recent(self, scope: Scope, limit: int) -> list[str]:
        """Ids of the trajectories of a scope that were written last, newest first."""
        if limit <= 0:
            return []
        key = ScopeKeys.of(scope).recent
        names: list[bytes] | None = await self.calls.read(key, lambda: self.newest(key, limit))
        return [text_of(name) for name in names or ()]

    async def newest(self, key: str, limit: int) -> list[bytes]:
        """The last members of a sorted set."""
        await self.calls.started()
        found: Any = await self.calls.client.zrevrange(key, 0, limit - 1)
        return list(found)

    async def changes(self, scope: Scope, since: str) -> Changes | None:
        """What happened in a scope since a moment that an earlier call gave; None when that is not to be had."""
        keys = ScopeKeys.of(scope)
        told = await self.calls.read(
            keys.recent, lambda: self.calls.eval("changes", [keys.recent, keys.gone], since, MAX_CHANGED)
        )
        if told is None:
            return None
        now, written, deleted = told
        return Changes(now.decode(), tuple(map(text_of, written)), frozenset(name.decode() for name in deleted))

    async def describe(self, trajectory: Trajectory) -> Stored | None:
        """What is stored of a trajectory."""
        keys = Keys.of(trajectory)
        if not storable(trajectory):
            return None
        found = await self.calls.read(keys.meta, lambda: self.record(keys.meta))
        if not found or found[0] is None:
            return None
        tokens, turns, size, updated = (int(value or 0) for value in found)
        return Stored(tokens, turns, size, updated)

    async def record(self, key: str) -> Sequence[bytes | None]:
        """Fields of a trajectory's record."""
        await self.calls.started()
        found: Any = await self.calls.client.hmget(key, ["tokens", "turns", "bytes", "updated"])
        return list(found)

    async def delete(self, trajectory: Trajectory) -> bool | None:
        """Delete a trajectory behind the writes that are under way, in place of those that wait: whether there was one;
        None when that is not done in time, and goes on."""
        if not storable(trajectory):
            return False
        self.disown(trajectory)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        key = Keys.of(trajectory).tokens
        self.deleting[key] += 1
        done.add_done_callback(lambda _: self.deleted(key))
        if not self.put(Write(trajectory, Kind.DELETE, done=done)):
            done.cancel()
            return None
        await asyncio.wait([done], timeout=WRITE_S)
        return done.result() if done.done() and not done.cancelled() else None

    def deleted(self, key: str) -> None:
        """A deletion is done, or given up."""
        self.deleting[key] -= 1
        if not self.deleting[key]:
            del self.deleting[key]

    def disown(self, trajectory: Trajectory) -> None:
        """Write nothing of what waits for a trajectory, and let it begin anew."""
        self.outbox.forget(trajectory)
        self.places.pop(Keys.of(trajectory).tokens, None)

    def put(self, write: Write) -> bool:
        """Queue a write, and see that somebody works on the queue; False once the store is closed."""
        if self.calls.closed:
            self.outbox.dropped += 1
            return False
        if write.kind in (Kind.APPEND, Kind.DELETE):
            lane = self.calls.lane(Keys.of(write.trajectory).tokens)
        else:
            lane = self.calls.lane(ScopeKeys.of(write.trajectory.scope).recent)
        self.outbox.put(write, lane)
        writer = self.writers.get(lane)
        if writer is None or writer.done():
            self.writers[lane] = asyncio.get_running_loop().create_task(self.work(lane))
        return True

    async def flush(self) -> None:
        """Wait until the queue is written, but not for long."""
        try:
            async with asyncio.timeout(FLUSH_S):
                while len(self.outbox):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            logger.warning("%d writes of histories did not reach the store in time", len(self.outbox))

    async def close(self) -> None:
        """Write what waits, as far as that goes quickly, and disconnect; a Redis that hangs holds it up for seconds."""
        await self.flush()
        self.calls.closed = True
        for writer in self.writers.values():
            await ended(writer, 0)
        await self.calls.close()

    async def work(self, lane: str) -> None:
        """Write what waits for a server.

        A cancellation that a library swallowed on the way still ends it.
        """
        task, tries = asyncio.current_task(), Counter[Write]()
        while not self.calls.closed and not (task and task.cancelling()):
            batch = self.outbox.batch(lane, WRITERS)
            if not batch:
                return
            self.outbox.active.update(batch)
            try:
                done = await asyncio.gather(*(self.attempt(lane, write) for write in batch))
            finally:
                self.outbox.active.difference_update(batch)
            failed = [write for write, well in zip(batch, done, strict=True) if not well]
            if not failed:
                tries.clear()
                continue
            if await self.calls.alive(lane):
                tries.update(failed)
                self.give_up([write for write in failed if tries[write] >= WRITE_TRIES])
            await asyncio.sleep(PAUSE_S)

    async def attempt(self, lane: str, write: Write) -> bool:
        """Do one write; whether it is done with."""
        act = {Kind.APPEND: self.add, Kind.NOTE: self.note, Kind.DELETE: self.erase, Kind.DISOWN: self.tell}[write.kind]
        if await self.calls.write(lane, lambda: act(write)) is None:
            return False
        self.outbox.remove(write)
        return True

    def give_up(self, writes: Sequence[Write]) -> None:
        """Drop writes that a server which answers did not take."""
        for write in writes:
            self.outbox.drop(write)
            if write.done is not None:
                write.done.cancel()

    async def add(self, write: Write) -> bool:
        """Append chunks."""
        keys = Keys.of(write.trajectory)
        limits = (max(self.config.ttl_s, 1), MAX_CHUNKS, self.config.trajectory_tokens)
        names = [keys.tokens, keys.meta, keys.gone]
        kept = await self.calls.eval("append", names, VERSION, write.name, *limits, *write.chunks)
        if kept < 0:
            self.counts["newer_left" if kept == -1 else "gone"] += 1
            return True
        self.counts["appended"] += 1
        self.counts["appended_tokens"] += write.tokens
        self.put(Write(write.trajectory, Kind.NOTE, kept=kept))
        return True

    async def note(self, write: Write) -> bool:
        """Tell the scope of an append, and make it keep its limits."""
        scope = ScopeKeys.of(write.trajectory.scope)
        limits = (max(self.config.ttl_s, 1), MAX_RECENT, self.config.scope_bytes)
        member = bytes_of(write.trajectory.id)
        leaving = await self.calls.eval("remember", [scope.recent, scope.sizes], member, write.kept, *limits)
        for name in leaving:
            await self.evict(Trajectory(text_of(name), write.trajectory.scope))
        return True

    async def evict(self, trajectory: Trajectory) -> None:
        """Remove a trajectory for which its scope has no more room."""
        keys = Keys.of(trajectory)
        names = [keys.tokens, keys.meta, keys.gone]
        lane = self.calls.lane(keys.tokens)
        if await self.calls.write(lane, lambda: self.calls.eval("delete", names, VERSION, 0)):
            self.counts["evicted"] += 1

    async def erase(self, write: Write) -> bool:
        """Delete a trajectory."""
        keys = Keys.of(write.trajectory)
        names = [keys.tokens, keys.meta, keys.gone]
        removed = await self.calls.eval("delete", names, ANY_VERSION, REFUSAL_S)
        self.put(Write(write.trajectory, Kind.DISOWN, found=removed > 0, done=write.done))
        return True

    async def tell(self, write: Write) -> bool:
        """Tell the scope, and with it the other processes, of a deletion."""
        scope = ScopeKeys.of(write.trajectory.scope)
        member, digest = bytes_of(write.trajectory.id), digest_of(write.trajectory)
        names = [scope.recent, scope.sizes, scope.gone]
        known = await self.calls.eval("disown", names, member, digest, max(self.config.ttl_s, 1))
        if write.done is not None and not write.done.done():
            write.done.set_result(write.found or known > 0)
        return True

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges by metric name."""
        return {f"store_{name}_total": count for name, count in {**self.calls.counts, **self.counts}.items()} | {
            "store_queue_bytes": self.outbox.bytes,
            "store_queue_writes": len(self.outbox),
            "store_dropped_total": self.outbox.dropped,
            "store_withdrawn_total": self.outbox.withdrawn,
            "store_breaker_open": int(self.calls.open),
        }


def bytes_of(name: str) -> bytes:
    """A trajectory's id as a member of a set."""
    return name.encode("utf-8", "surrogateescape")


def text_of(name: bytes) -> str:
    """The id that a member of a set stands for."""
    return name.decode("utf-8", "surrogateescape")
