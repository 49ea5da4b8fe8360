"""`Histories`: all token histories of a worker, by trajectory and scope, within a byte budget."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.history import (
    STRETCH,
    Conversation,
    ScopeHistory,
    TrajectoryHistory,
    Turn,
    documents,
)
from agentspec.cache.index import as_tokens
from agentspec.cache.rolling import OVERLAP, Document
from agentspec.cache.session import HistorySession
from agentspec.cache.shelf import Shelf
from agentspec.cache.store import HistoryStore
from agentspec.config import CacheConfig
from agentspec.errors import InvalidRequest
from agentspec.types import Origin, Scope, Trajectory

logger = logging.getLogger(__name__)

CHUNK = 2048
"""Tokens indexed under one hold of a scope's lock: a few milliseconds."""

WARM_TRAJECTORIES = 32
"""Stored trajectories that a scope new to this process is warmed with."""

NO_TOKENS = np.empty(0, np.int32)

SOURCES = {str(origin.name).lower(): origin for origin in Origin}


def allowed_origins(sources: frozenset[str] | None) -> Origin:
    """The origins by their names, all for None; raises `InvalidRequest` for an unknown name."""
    if sources is None:
        return Origin.TRAJECTORY | Origin.SCOPE
    allowed = Origin(0)
    for source in sources:
        if source not in SOURCES:
            raise InvalidRequest(f"unknown draft source {source!r}, expected {' or '.join(SOURCES)}")
        allowed |= SOURCES[source]
    return allowed


async def extend(history: TrajectoryHistory, conversation: Conversation, tokens: Int32s) -> None:
    """Index tokens in chunks, so that neither drafting nor the event loop waits long.

    Cancelling frees the conversation.
    """
    try:
        for start in range(0, tokens.size, CHUNK):
            with history.scope.lock:
                history.extend(conversation, tokens[start : start + CHUNK])
            if start + CHUNK < tokens.size:
                await asyncio.sleep(0)
    except BaseException:
        conversation.busy = False
        raise


async def share(scope: ScopeHistory, turn: Turn) -> None:
    """Add a turn to what its scope shares, in chunks. What the scope already knows of its start is left out."""
    with scope.lock:
        known = scope.index.known(turn.new)
    skipped = known if known >= STRETCH else 0
    document = Document(np.concatenate((turn.overlap, turn.new[:skipped]))[-OVERLAP:])
    for start in range(skipped, turn.new.size, CHUNK):
        with scope.lock:
            scope.index.extend(document, turn.new[start : start + CHUNK])
        if start + CHUNK < turn.new.size:
            await asyncio.sleep(0)


class Histories:
    """Opens sessions. Belongs to one event loop, while its sessions may draft on other threads."""

    def __init__(self, config: CacheConfig, store: HistoryStore | None = None) -> None:
        self.config = config
        self.store = store
        self.shelf = Shelf(config, store.reserved_bytes if store else 0)
        self.tasks: set[asyncio.Task[None]] = set()
        self.sessions = 0
        self.failures = 0

    async def open(
        self, trajectory: Trajectory, prompt: Sequence[int], sources: frozenset[str] | None = None
    ) -> HistorySession:
        """The drafter of a request whose prompt is `prompt`.

        Takes time in proportion to what is new of the prompt, and waits for the store no longer than its deadline,
        once per trajectory. Raises `InvalidRequest` for an empty prompt and for an unknown source.
        """
        allowed = allowed_origins(sources)
        tokens = as_tokens(prompt)
        if not tokens.size:
            raise InvalidRequest("the prompt has no tokens")
        history = await self.history(trajectory)
        parent = await self.parent(trajectory)
        with history.scope.lock:
            conversation = history.begin(tokens)
        await extend(history, conversation, tokens[conversation.size :])
        self.shelf.settle(trajectory, history)
        self.sessions += 1
        loop = asyncio.get_running_loop()
        return HistorySession(
            history, conversation, parent, allowed, lambda session: self.finish(loop, trajectory, session)
        )

    async def branch(
        self, trajectory: Trajectory, prompt: Sequence[int], sources: frozenset[str] | None = None
    ) -> HistorySession:
        """The drafter of a further choice for a prompt that `open` was called with: it reads the trajectory's history
        and its scope's, learns from what it sees itself, and leaves nothing behind. Raises what `open` raises."""
        allowed = allowed_origins(sources)
        tail = as_tokens(prompt[-OVERLAP:])
        if not tail.size:
            raise InvalidRequest("the prompt has no tokens")
        trunk = await self.history(trajectory)
        own = TrajectoryHistory(self.shelf.trajectory_tokens, trunk.scope)
        conversation = own.resume()
        conversation.append(tail)
        conversation.document.tail = tail
        self.sessions += 1
        return HistorySession(own, conversation, trunk, allowed, self.forget)

    def forget(self, _: HistorySession) -> None:
        """A branch ended."""
        self.sessions -= 1

    async def history(self, trajectory: Trajectory) -> TrajectoryHistory:
        """The history of a trajectory, from this process or else from the store."""
        known = self.shelf.find(trajectory)
        if known is not None:
            return known
        if self.store is not None and trajectory.scope not in self.shelf.scopes:
            self.start(asyncio.get_running_loop(), self.warm(self.store, trajectory.scope))
        stored = await self.store.load(trajectory) if self.store is not None else NO_TOKENS
        known = self.shelf.find(trajectory)
        if known is not None:
            return known
        history = self.shelf.add(trajectory)
        for document in documents(stored):
            with history.scope.lock:
                conversation = history.resume()
            await extend(history, conversation, document)
            with history.scope.lock:
                history.save(conversation)
                conversation.busy = False
        self.shelf.settle(trajectory, history)
        return history

    async def parent(self, trajectory: Trajectory) -> TrajectoryHistory | None:
        """The history that a trajectory inherits, if there is one."""
        if trajectory.parent is None or trajectory.parent == trajectory.id:
            return None
        parent = Trajectory(trajectory.parent, trajectory.scope)
        return self.shelf.find(parent) if self.store is None else await self.history(parent)

    def finish(self, loop: asyncio.AbstractEventLoop, trajectory: Trajectory, session: HistorySession) -> None:
        """Share and store what a closed session added."""
        self.sessions -= 1
        history = session.history
        with history.scope.lock:
            turn = history.save(session.conversation)
        self.start(loop, share(history.scope, turn))
        if self.store is not None:
            self.start(loop, self.store.append(trajectory, turn.stored))
        self.shelf.settle(trajectory, history)

    async def warm(self, store: HistoryStore, scope: Scope) -> None:
        """Share the stored recent trajectories of a scope that is new to this process."""
        room, found = self.shelf.scope_tokens // 2, list[Int32s]()
        for name in await store.recent(scope, WARM_TRAJECTORIES):
            tokens = await store.load(Trajectory(name, scope))
            room -= tokens.size
            if room < 0:
                break
            found = documents(tokens) + found
        for document in found:
            await share(self.shelf.scope(scope), Turn(NO_TOKENS, document, continues=False))

    def start(self, loop: asyncio.AbstractEventLoop, work: Coroutine[None, None, None]) -> None:
        """Do work in the background; `flush` waits for it."""
        task = loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.finished)

    def finished(self, task: asyncio.Task[None]) -> None:
        """Count and log background work that failed."""
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures += 1
            logger.error("background work on histories failed", exc_info=error)

    async def delete(self, trajectory: Trajectory) -> None:
        """Forget a trajectory here and in the store; what its scope learned from it stays until it ages out."""
        self.shelf.drop((trajectory.scope, trajectory.id))
        if self.store is not None:
            await self.store.delete(trajectory)

    async def flush(self) -> None:
        """Wait until finished turns are shared and, unless that takes long, stored."""
        while self.tasks:
            await asyncio.wait(self.tasks)
        if self.store is not None:
            await self.store.flush()

    async def close(self) -> None:
        """Flush, and close the store."""
        await self.flush()
        if self.store is not None:
            await self.store.close()

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges by metric name, those of the store included."""
        own = {
            "history_bytes": self.shelf.bytes,
            "history_trajectories": len(self.shelf.trajectories),
            "history_scopes": len(self.shelf.scopes),
            "history_sessions": self.sessions,
            "history_evictions_total": self.shelf.evictions,
            "history_failures_total": self.failures,
        }
        return own if self.store is None else own | dict(self.store.stats())
