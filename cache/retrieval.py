"""`Histories`: all token histories of a worker, by trajectory and scope, within a byte budget."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import digest_of
from agentspec.cache.follow import Follower
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
from agentspec.cache.store import Changes, HistoryStore
from agentspec.config import CacheConfig
from agentspec.errors import InvalidRequest
from agentspec.types import Origin, Scope, Trajectory, TrajectoryState

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
        return ~Origin(0)
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


async def absorb(history: TrajectoryHistory, document: Int32s) -> None:
    """Index a document of a trajectory's history that no prompt here extends, in chunks, unless it is known."""
    with history.scope.lock:
        if history.index.known(document) == document.size:
            return
    written = Document()
    for start in range(0, document.size, CHUNK):
        with history.scope.lock:
            history.index.extend(written, document[start : start + CHUNK])
        await asyncio.sleep(0)


async def share(scope: ScopeHistory, name: str, turn: Turn, gone: Callable[[], bool] = lambda: False) -> None:
    """Add a trajectory's turn to what its scope shares, in chunks, until the trajectory is `gone`. What the scope
    already knows of its start is left out."""
    with scope.lock:
        if gone():
            return
        known = scope.index.known(turn.new)
        scope.learns_from(name)
    skipped = known if known >= STRETCH else 0
    document = Document(np.concatenate((turn.overlap, turn.new[:skipped]))[-OVERLAP:])
    for start in range(skipped, turn.new.size, CHUNK):
        with scope.lock:
            if gone():
                return
            scope.index.extend(document, turn.new[start : start + CHUNK])
        if start + CHUNK < turn.new.size:
            await asyncio.sleep(0)


class Histories:
    """Opens sessions. Belongs to one event loop, while its sessions may draft on other threads."""

    def __init__(self, config: CacheConfig, store: HistoryStore | None = None) -> None:
        self.config = config
        self.store = store
        self.shelf = Shelf(config, store.reserved_bytes if store else 0)
        self.follower = Follower(store, self.warm, self.catch_up) if store is not None and store.shared else None
        self.on_forgotten: Callable[[Scope, frozenset[str]], None] = lambda scope, digests: None
        """Is told the scope and the digests of trajectories that were deleted."""

        self.own_deletions: set[str] = set()
        """Digests of trajectories that this process deleted, until the store tells of them."""

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
        history.turns += 1
        history.used = time.time()
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
        self.follow(trajectory.scope)
        known = self.shelf.find(trajectory)
        if known is not None:
            return known
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
        history.used = time.time()
        if history.deleted:
            return
        with history.scope.lock:
            turn = history.save(session.conversation)
        self.start(loop, share(history.scope, trajectory.id, turn, lambda: history.deleted))
        if self.store is not None:
            self.start(loop, self.keep(self.store, trajectory, history, turn))
        self.shelf.settle(trajectory, history)

    async def keep(self, store: HistoryStore, trajectory: Trajectory, history: TrajectoryHistory, turn: Turn) -> None:
        """Store a turn, unless its trajectory was deleted meanwhile."""
        if not history.deleted:
            await store.append(trajectory, turn.stored)

    def follow(self, scope: Scope) -> None:
        """Bring in what the store has of a scope: once, and where others write to it too, from now on."""
        loop, new = asyncio.get_running_loop(), scope not in self.shelf.scopes
        if self.follower is not None:
            if new:
                self.follower.leave(scope)
                self.start(loop, self.follower.look(scope))
            self.follower.use(scope)
        elif self.store is not None and new:
            self.start(loop, self.warm(scope))
        self.shelf.scope(scope)

    async def warm(self, scope: Scope) -> None:
        """Share the stored recent trajectories of a scope that is new to this process."""
        assert self.store is not None
        room, found = self.shelf.scope_tokens // 2, list[tuple[str, Int32s]]()
        for name in await self.store.recent(scope, WARM_TRAJECTORIES):
            tokens = await self.store.load(Trajectory(name, scope))
            room -= tokens.size
            if room < 0:
                break
            found = [(name, document) for document in documents(tokens)] + found
        for name, document in found:
            await self.teach(Trajectory(name, scope), document)

    async def teach(self, trajectory: Trajectory, document: Int32s) -> None:
        """Share a stored document of a trajectory with its scope."""
        history = self.shelf.scope(trajectory.scope)
        await share(history, trajectory.id, Turn(NO_TOKENS, document, continues=False))

    async def catch_up(self, scope: Scope, changes: Changes) -> None:
        """Take in what other processes did in a scope."""
        assert self.store is not None
        deleted = changes.deleted - self.own_deletions
        self.own_deletions -= changes.deleted
        if deleted:
            for trajectory in self.known(scope, deleted):
                self.store.disown(trajectory)
                self.forget_here(trajectory)
            self.on_forgotten(scope, deleted)
        for name in reversed(changes.written):
            trajectory = Trajectory(name, scope)
            history = self.shelf.trajectories.get((scope, name))
            for document in documents(await self.store.news(trajectory)):
                if history is not None and not history.deleted:
                    await absorb(history, document)
                await self.teach(trajectory, document)
            if history is not None and not history.deleted:
                self.shelf.settle(trajectory, history)

    def known(self, scope: Scope, digests: frozenset[str]) -> list[Trajectory]:
        """The trajectories of a scope that this process has something of, among those with some digests."""
        names = {name for owner, name in self.shelf.trajectories if owner == scope}
        if scope in self.shelf.scopes:
            names |= set(self.shelf.scopes[scope].sources)
        found = [Trajectory(name, scope) for name in names]
        return [trajectory for trajectory in found if digest_of(trajectory) in digests]

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

    async def delete(self, trajectory: Trajectory) -> bool | None:
        """Forget a trajectory here and in the store, and what its scope learned from it: whether there was anything;
        None when the store did not confirm it. A session that is open goes on and leaves nothing."""
        known = self.forget_here(trajectory)
        if self.follower is not None:
            self.own_deletions.add(digest_of(trajectory))
        stored = await self.store.delete(trajectory) if self.store is not None else False
        return None if stored is None else known or stored

    def forget_here(self, trajectory: Trajectory) -> bool:
        """Forget a trajectory in this process; the scope learns anew what the others said."""
        key = (trajectory.scope, trajectory.id)
        history = self.shelf.trajectories.get(key)
        if history is not None:
            history.deleted = True
            self.shelf.drop(key)
        scope = self.shelf.scopes.get(trajectory.scope)
        if scope is not None and (history is not None or trajectory.id in scope.sources):
            with scope.lock:
                learned = trajectory.id in scope.sources
                if learned:
                    scope.clear(self.shelf.scope_tokens)
            if learned:
                self.start(asyncio.get_running_loop(), self.relearn(trajectory.scope))
            return True
        return history is not None

    async def relearn(self, scope: Scope) -> None:
        """Share again what the trajectories of a scope said, those in this process and then those in the store."""
        for (owner, name), history in list(self.shelf.trajectories.items()):
            for conversation in list(history.conversations) if owner == scope else ():
                turn = Turn(NO_TOKENS, conversation.view()[: conversation.saved].copy(), continues=False)
                await share(history.scope, name, turn, lambda history=history: history.deleted)  # type: ignore[misc]
        if self.store is not None:
            await self.warm(scope)

    async def inspect(self, trajectory: Trajectory) -> TrajectoryState | None:
        """What is kept of a trajectory, here and in the store."""
        history = self.shelf.trajectories.get((trajectory.scope, trajectory.id))
        stored = await self.store.describe(trajectory) if self.store is not None else None
        if history is None and stored is None:
            return None
        return TrajectoryState(
            tokens=max(history.index.tokens if history else 0, stored.tokens if stored else 0),
            turns=max(history.turns if history else 0, stored.turns if stored else 0),
            last_used=max(history.used if history else 0.0, stored.updated if stored else 0.0),
            memory_bytes=history.bytes if history else 0,
            stored_bytes=stored.bytes if stored else 0,
            kv_bytes=0,
            drafted=history.drafted if history else 0,
            accepted=history.accepted if history else 0,
        )

    async def flush(self) -> None:
        """Wait until finished turns are shared and, unless that takes long, stored."""
        while self.tasks:
            await asyncio.wait(self.tasks)
        if self.store is not None:
            await self.store.flush()

    async def close(self) -> None:
        """Flush, and close the store."""
        if self.follower is not None:
            await self.follower.close()
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
