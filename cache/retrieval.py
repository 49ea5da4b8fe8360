"""`Histories`: all token histories of a worker, by trajectory and scope, within a byte budget."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import digest_of
from agentspec.cache.corpus import Corpus
from agentspec.cache.deletions import Deletions
from agentspec.cache.follow import Follower
from agentspec.cache.history import TrajectoryHistory, Turn, documents
from agentspec.cache.index import SuffixIndex, as_tokens
from agentspec.cache.rolling import OVERLAP
from agentspec.cache.session import HistorySession
from agentspec.cache.sharing import Gone, absorb, extend, restore, share
from agentspec.cache.shelf import Shelf
from agentspec.cache.store import Changes, HistoryStore
from agentspec.config import CacheConfig
from agentspec.errors import InvalidRequest
from agentspec.types import Origin, Scope, Trajectory, TrajectoryState

logger = logging.getLogger(__name__)

WARM_TRAJECTORIES = 32
"""Stored trajectories that a scope new to this process is warmed with."""

NO_TOKENS = np.empty(0, np.int32)

SOURCES = {str(origin.name).lower(): origin for origin in Origin}


def allowed_origins(sources: frozenset[str] | None) -> Origin:
    """The origins by their names, all but `TLAR` for None; raises `InvalidRequest` for an unknown name."""
    if sources is None:
        return ~Origin.TLAR
    allowed = Origin(0)
    for source in sources:
        if source not in SOURCES:
            raise InvalidRequest(f"unknown draft source {source!r}, expected {' or '.join(SOURCES)}")
        allowed |= SOURCES[source]
    return allowed


class Histories:
    """Opens sessions. Belongs to one event loop, while its sessions may draft on other threads."""

    def __init__(self, config: CacheConfig, store: HistoryStore | None = None) -> None:
        self.config = config
        self.store = store
        self.shelf = Shelf(config, store.reserved_bytes if store else 0)
        self.follower = Follower(store, self.warm, self.catch_up) if store is not None and store.shared else None
        self.on_forgotten: Callable[[Scope, frozenset[str]], None] = lambda scope, digests: None
        """Is told the scope and the digests of trajectories that were deleted."""

        self.deletions = Deletions()
        self.own_deletions: set[str] = set()
        """Digests of trajectories that this process deleted, until the store tells of them."""

        self.corpora: Sequence[Corpus] = ()
        """What all requests draft from besides histories."""

        self.tasks: set[asyncio.Task[None]] = set()
        self.sessions = 0
        self.failures = 0

    async def open(
        self,
        trajectory: Trajectory,
        prompt: Sequence[int],
        sources: frozenset[str] | None = None,
        received: float | None = None,
    ) -> HistorySession:
        """The drafter of a request whose prompt is `prompt`.

        Takes time in proportion to what is new of the prompt, and waits for the store no longer than its deadline,
        once per trajectory. Nothing stays of a request that was received (by the monotonic clock; None for now) before
        its trajectory was deleted. Raises `InvalidRequest` for an empty prompt and for an unknown source.
        """
        received = time.monotonic() if received is None else received
        allowed = allowed_origins(sources)
        tokens = as_tokens(prompt)
        if not tokens.size:
            raise InvalidRequest("the prompt has no tokens")
        history = await self.history(trajectory, received)
        parent = await self.parent(trajectory, received)
        with history.scope.lock:
            conversation = history.begin(tokens)
        await extend(history, conversation, tokens[conversation.size :])
        history.turns += 1
        history.used = time.time()
        self.shelf.settle(trajectory, history)
        self.sessions += 1
        loop = asyncio.get_running_loop()
        return HistorySession(
            history,
            conversation,
            parent,
            allowed,
            self.indexes,
            lambda session: self.finish(loop, trajectory, session, received),
        )

    async def branch(
        self,
        trajectory: Trajectory,
        prompt: Sequence[int],
        sources: frozenset[str] | None = None,
        received: float | None = None,
    ) -> HistorySession:
        """The drafter of a further choice for a prompt that `open` was called with: it reads the trajectory's history
        and its scope's, learns from what it sees itself, and leaves nothing behind. Raises what `open` raises."""
        allowed = allowed_origins(sources)
        tail = as_tokens(prompt[-OVERLAP:])
        if not tail.size:
            raise InvalidRequest("the prompt has no tokens")
        trunk = await self.history(trajectory, time.monotonic() if received is None else received)
        own = TrajectoryHistory(self.shelf.trajectory_tokens, trunk.scope)
        conversation = own.resume()
        conversation.append(tail)
        conversation.document.tail = tail
        self.sessions += 1
        return HistorySession(own, conversation, trunk, allowed, self.indexes, self.forget)

    def forget(self, _: HistorySession) -> None:
        """A branch ended."""
        self.sessions -= 1

    @property
    def indexes(self) -> Sequence[SuffixIndex]:
        """Of the corpora."""
        return [corpus.index for corpus in self.corpora]

    async def history(self, trajectory: Trajectory, received: float) -> TrajectoryHistory:
        """The history of a trajectory for a request: from this process or else from the store, or one apart where the
        trajectory was deleted since the request was received."""
        self.follow(trajectory.scope)
        stored: list[Int32s] = []
        if self.shelf.find(trajectory) is None and self.store is not None:
            stored = documents(await self.store.load(trajectory))
        if self.deletions.since(trajectory, received):
            apart = TrajectoryHistory(self.shelf.trajectory_tokens, self.shelf.scope(trajectory.scope))
            apart.deleted = True
            return apart
        known = self.shelf.find(trajectory)
        if known is not None:
            return known
        history = self.shelf.add(trajectory)
        await restore(history, stored)
        self.shelf.settle(trajectory, history)
        return history

    async def parent(self, trajectory: Trajectory, received: float) -> TrajectoryHistory | None:
        """The history that a trajectory inherits, if there is one."""
        if trajectory.parent is None or trajectory.parent == trajectory.id:
            return None
        parent = Trajectory(trajectory.parent, trajectory.scope)
        return self.shelf.find(parent) if self.store is None else await self.history(parent, received)

    def finish(
        self, loop: asyncio.AbstractEventLoop, trajectory: Trajectory, session: HistorySession, received: float
    ) -> None:
        """Share and store what a closed session added, unless its trajectory was deleted since its request came."""
        self.sessions -= 1
        history, gone = session.history, self.gone(trajectory, received, session.history)
        history.used = time.time()
        if gone():
            return
        with history.scope.lock:
            turn = history.save(session.conversation)
        self.start(loop, share(history.scope, trajectory.id, turn, gone))
        if self.store is not None:
            self.start(loop, self.keep(self.store, trajectory, turn, gone))
        self.shelf.settle(trajectory, history)

    def gone(self, trajectory: Trajectory, moment: float, history: TrajectoryHistory | None = None) -> Gone:
        """Whether a trajectory was deleted since a moment, or the history that its text is from."""
        return lambda: (history is not None and history.deleted) or self.deletions.since(trajectory, moment)

    async def keep(self, store: HistoryStore, trajectory: Trajectory, turn: Turn, gone: Gone) -> None:
        """Store a turn, unless its trajectory was deleted meanwhile."""
        if not gone():
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
        room, found = self.shelf.scope_tokens // 2, list[tuple[Trajectory, Int32s, float]]()
        for name in await self.store.recent(scope, WARM_TRAJECTORIES):
            trajectory, moment = Trajectory(name, scope), time.monotonic()
            tokens = await self.store.load(trajectory)
            room -= tokens.size
            if room < 0:
                break
            found = [(trajectory, document, moment) for document in documents(tokens)] + found
        for trajectory, document, moment in found:
            await self.teach(trajectory, document, moment)

    async def teach(self, trajectory: Trajectory, document: Int32s, moment: float) -> None:
        """Share a document that was asked for at a moment, unless its trajectory was deleted since."""
        history = self.shelf.scope(trajectory.scope)
        turn = Turn(NO_TOKENS, document, continues=False)
        await share(history, trajectory.id, turn, self.gone(trajectory, moment))

    async def catch_up(self, scope: Scope, changes: Changes) -> None:
        """Take in what other processes did in a scope."""
        assert self.store is not None
        deleted = changes.deleted - self.own_deletions
        self.own_deletions -= changes.deleted
        if deleted:
            for digest in deleted:
                self.deletions.note(digest)
            for trajectory in self.known(scope, deleted):
                self.store.disown(trajectory)
                self.forget_here(trajectory)
            self.on_forgotten(scope, deleted)
        for name in reversed(changes.written):
            await self.take_news(self.store, Trajectory(name, scope))

    async def take_news(self, store: HistoryStore, trajectory: Trajectory) -> None:
        """Take in what other processes added to a trajectory."""
        moment, history = time.monotonic(), self.shelf.trajectories.get((trajectory.scope, trajectory.id))
        for document in documents(await store.news(trajectory)):
            if history is not None:
                await absorb(history, document, self.gone(trajectory, moment, history))
            await self.teach(trajectory, document, moment)
        if history is not None:
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
        known, digest = self.forget_here(trajectory), digest_of(trajectory)
        if self.follower is not None:
            self.own_deletions.add(digest)
        stored = await self.store.delete(trajectory) if self.store is not None else False
        if stored is None:
            self.own_deletions.discard(digest)
        return None if stored is None else known or stored

    def forget_here(self, trajectory: Trajectory) -> bool:
        """Forget a trajectory in this process; the scope learns anew what the others said."""
        self.deletions.note(digest_of(trajectory))
        known = self.shelf.forget(trajectory)
        scope = self.shelf.scopes.get(trajectory.scope)
        if scope is None:
            return known
        with scope.lock:
            learned = trajectory.id in scope.sources
            clearing = learned or scope.unlisted
            if clearing:
                scope.clear(self.shelf.scope_tokens)
        if clearing:
            self.start(asyncio.get_running_loop(), self.relearn(trajectory.scope))
        return known or learned

    async def relearn(self, scope: Scope) -> None:
        """Share again what the trajectories of a scope said, those in this process and then those in the store."""
        moment = time.monotonic()
        for (owner, name), history in list(self.shelf.trajectories.items()):
            gone = self.gone(Trajectory(name, owner), moment, history)
            for conversation in list(history.conversations) if owner == scope else ():
                turn = Turn(NO_TOKENS, conversation.view()[: conversation.saved].copy(), continues=False)
                await share(history.scope, name, turn, gone)
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
            "corpora": len(self.corpora),
            "corpora_bytes": sum(index.bytes for index in self.indexes),
        }
        return own if self.store is None else own | dict(self.store.stats())
