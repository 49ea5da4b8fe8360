"""Histories in Redis, shared by every process that uses the same one.

Keys (see `codec`): `as:{tenant:model:trajectory}:tok` is a list of chunks, `:meta` a hash with the time of the last
write and the tokens written, `as:{tenant:model}:recent` a sorted set of trajectories by that time. All expire.
"""

import asyncio
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from agentspec.cache.automaton import Int32s
from agentspec.cache.breaker import Breaker
from agentspec.cache.codec import CHUNK_TOKENS, Chunk, Keys, join, pack, recent_key, storable, unpack
from agentspec.cache.index import Tokens
from agentspec.cache.outbox import Outbox, Write
from agentspec.config import CacheConfig
from agentspec.errors import ConfigError
from agentspec.types import Scope, Trajectory

logger = logging.getLogger(__name__)

MAX_CHUNKS = 1024
"""Chunks kept of a trajectory, the newest."""

MAX_RECENT = 256
"""Trajectories remembered of a scope, the newest."""

MAX_ENDS = 10_000
"""Trajectories of which this process knows the last stored chunk."""

READERS = 16
"""Reads at a time; further ones are skipped."""

OUTBOX_BYTES = 16 * 1024**2
WRITE_S = 1.0
FLUSH_S = 1.0
CLOSE_S = 1.0
"""Wait for each of the writer's and the client's ends. A client waits until all that it wrote has left, which a Redis
that does not read never lets happen."""

WRITE_TRIES = 3

Answer = TypeVar("Answer")


class RedisStore:
    """A `HistoryStore`. Nothing connects before the first call; belongs to one event loop."""

    def __init__(
        self, config: CacheConfig, clock: Callable[[], float] = time.monotonic, outbox_bytes: int = OUTBOX_BYTES
    ) -> None:
        self.config = config
        self.deadline_s = config.deadline_ms / 1000
        self.client = connect(config.redis_url)
        self.breaker = Breaker(clock)
        self.outbox = Outbox(outbox_bytes)
        self.reserved_bytes = outbox_bytes
        self.readers = asyncio.Semaphore(READERS)
        self.ends: OrderedDict[str, int] = OrderedDict()
        self.writer: asyncio.Task[None] | None = None
        self.closed = False
        self.waiting = asyncio.Event()
        self.counts = dict.fromkeys(("errors", "skipped", "busy", "unreadable", "refused", "written"), 0)

    async def append(self, trajectory: Trajectory, tokens: Tokens) -> None:
        """Queue tokens to be added to the end of a trajectory."""
        try:
            array = np.asarray(tokens, np.int32).reshape(-1)
        except (OverflowError, TypeError, ValueError):
            self.counts["refused"] += 1
            return
        if not storable(trajectory):
            self.counts["refused"] += 1
        elif array.size:
            self.put(Write(trajectory, self.chunks(Keys.of(trajectory).tokens, array), array.size))

    def chunks(self, key: str, tokens: Int32s) -> tuple[bytes, ...]:
        """Tokens as chunks that continue what this process read or wrote last under a key."""
        previous, packed = self.ends.get(key, 0), []
        for start in range(0, tokens.size, CHUNK_TOKENS):
            identity = secrets.randbits(63) + 1
            packed.append(pack(Chunk(identity, previous, tokens[start : start + CHUNK_TOKENS])))
            previous = identity
        self.remember_end(key, previous)
        return tuple(packed)

    def remember_end(self, key: str, identity: int) -> None:
        """Note the last chunk of a key."""
        self.ends[key] = identity
        self.ends.move_to_end(key)
        if len(self.ends) > MAX_ENDS:
            self.ends.popitem(last=False)

    async def load(self, trajectory: Trajectory) -> Int32s:
        """The tokens of a trajectory; empty when there are none or they do not come within the deadline."""
        key = Keys.of(trajectory).tokens
        stored: list[bytes] | None = await self.read(lambda: self.client.lrange(key, -MAX_CHUNKS, -1))
        chunks = [unpack(data) for data in stored or ()]
        readable = [chunk for chunk in chunks if chunk is not None]
        self.counts["unreadable"] += len(chunks) - len(readable)
        if readable and key not in self.ends:
            self.remember_end(key, readable[-1].id)
        return join(readable)[-self.config.trajectory_tokens :]

    async def recent(self, scope: Scope, limit: int) -> list[str]:
        """Ids of the trajectories of a scope that were written last, newest first."""
        if limit <= 0:
            return []
        key = recent_key(scope)
        names: list[bytes] | None = await self.read(lambda: self.client.zrevrange(key, 0, limit - 1))
        return [name.decode("utf-8", "surrogateescape") for name in names or ()]

    async def delete(self, trajectory: Trajectory) -> None:
        """Queue a trajectory to be forgotten, in place of what is queued for it."""
        self.outbox.forget(trajectory)
        self.ends.pop(Keys.of(trajectory).tokens, None)
        self.put(Write(trajectory, None))

    def put(self, write: Write) -> None:
        """Queue a write, and see that somebody works on the queue."""
        if self.closed:
            self.outbox.dropped += 1
            return
        self.outbox.put(write)
        self.waiting.set()
        if self.writer is None or self.writer.done():
            self.writer = asyncio.get_running_loop().create_task(self.work())

    async def flush(self) -> None:
        """Wait until the queue is written, but not for long."""
        try:
            async with asyncio.timeout(FLUSH_S):
                while self.outbox.writes:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            logger.warning("%d writes of histories did not reach the store in time", len(self.outbox.writes))

    async def close(self) -> None:
        """Write what waits, as far as that goes quickly, and disconnect; a Redis that hangs holds it up for seconds."""
        await self.flush()
        self.closed = True
        if self.writer is not None:
            await ended(self.writer, 0)
        await ended(asyncio.create_task(self.client.aclose()), CLOSE_S)

    async def read(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        """The answer of Redis within the deadline, else None."""
        if self.readers.locked():
            self.counts["busy"] += 1
            return None
        async with self.readers:
            return await self.call(operation, self.deadline_s)

    async def call(self, operation: Callable[[], Awaitable[Answer]], deadline_s: float) -> Answer | None:
        """An operation's answer; None when it fails in any way, or while the breaker is open."""
        if self.closed or not self.breaker.allows():
            self.counts["skipped"] += 1
            return None
        try:
            async with asyncio.timeout(deadline_s):
                answer = await operation()
        except Exception as error:
            self.counts["errors"] += 1
            self.breaker.failed()
            logger.warning("the history store did not answer: %s", error or type(error).__name__)
            return None
        self.breaker.succeeded()
        return answer

    async def work(self) -> None:
        """Write the queue to Redis until the store is closed.

        A cancellation that a library swallowed on the way still ends it.
        """
        task, tries = asyncio.current_task(), 0
        while not self.closed and not (task and task.cancelling()):
            if not self.outbox.writes:
                self.waiting.clear()
                await self.waiting.wait()
            write = self.outbox.writes[0]
            if await self.call(lambda write=write: self.store(write), WRITE_S) is not None:  # type: ignore[misc]
                self.outbox.remove(write)
                self.counts["written"] += write.tokens
                tries = 0
            elif await self.call(self.client.ping, WRITE_S):
                tries += 1
                if tries == WRITE_TRIES:
                    self.outbox.remove(write)
                    self.outbox.dropped += 1
                    tries = 0
            else:
                await asyncio.sleep(self.breaker.pause_s / 4)

    async def store(self, write: Write) -> bool:
        """Do one write."""
        keys, recent = Keys.of(write.trajectory), recent_key(write.trajectory.scope)
        member = write.trajectory.id.encode("utf-8", "surrogateescape")
        if write.chunks is None:
            await self.client.delete(keys.tokens, keys.meta)
            await self.client.zrem(recent, member)
            return True
        now, ttl = time.time(), max(self.config.ttl_s, 1)
        async with self.client.pipeline(transaction=True) as own:
            own.rpush(keys.tokens, *write.chunks)
            own.ltrim(keys.tokens, -MAX_CHUNKS, -1)
            own.expire(keys.tokens, ttl)
            own.hset(keys.meta, "updated", str(now))
            own.hincrby(keys.meta, "tokens", write.tokens)
            own.expire(keys.meta, ttl)
            await own.execute()
        async with self.client.pipeline(transaction=True) as shared:
            shared.zadd(recent, {member: now})
            shared.zremrangebyrank(recent, 0, -MAX_RECENT - 1)
            shared.expire(recent, ttl)
            await shared.execute()
        return True

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges by metric name."""
        return {f"store_{name}_total": count for name, count in self.counts.items()} | {
            "store_queue_bytes": self.outbox.bytes,
            "store_dropped_total": self.outbox.dropped,
            "store_breaker_open": int(self.breaker.open),
        }


async def ended(task: asyncio.Task[None], patience_s: float) -> None:
    """Wait for a task, cancel it when that takes too long, and give it up when it does not end then either."""
    if patience_s:
        await asyncio.wait([task], timeout=patience_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_S)
    if not task.done():
        logger.warning("the history store did not close in time")
    elif not task.cancelled() and task.exception() is not None:
        logger.warning("the history store did not close well: %s", task.exception())


def connect(url: str) -> Redis:
    """A client that connects when it is first used, and again once when a pooled connection is dead."""
    try:
        client = Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 1),
            retry_on_error=[RedisConnectionError],
            health_check_interval=30,
            socket_keepalive=True,
            max_connections=READERS + 4,
        )
        pool: Any = client.connection_pool
        pool.make_connection()
    except (TypeError, ValueError) as error:
        shown = re.sub(r"//[^/@]*@", "//...@", url)
        raise ConfigError(f"AGENTSPEC_CACHE_REDIS_URL must be a Redis URL, got {shown!r}: {error}") from None
    return client
