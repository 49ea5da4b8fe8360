"""Prompts token by token as they were answered: what comes back as text is put in as it was generated."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentspec.cache.automaton import Int32s
from agentspec.cache.index import as_tokens
from agentspec.cache.replies import Replies, Reply
from agentspec.cache.retrieval import Histories
from agentspec.cache.splice import Return, Spelling, Splicer
from agentspec.engine.chat import Chat
from agentspec.types import Delta, GenerationRequest, Report, Scope, Trajectory


@dataclass(frozen=True, slots=True)
class Faithful:
    """A request whose prompt is that of the engine's own earlier turns, as far as it says the same."""

    request: GenerationRequest
    answers: int = 0
    """Answers that were put in."""

    first: int | None = None
    """The first position that is not as it was tokenised; None where all are."""


@dataclass(slots=True)
class Heard:
    """What a client got of one answer."""

    request: GenerationRequest
    tokens: int = 0
    size: int = 0
    """Bytes of text."""

    ended: bool = False

    def add(self, delta: Delta) -> None:
        """A piece of it was handed on."""
        self.tokens += delta.tokens
        self.size += len(delta.text.encode())
        self.ended = delta.finish is not None


class Fidelity:
    """Keeps answers, and splices the prompts of chats. Belongs to the thread of the event loop."""

    def __init__(self, chat: Chat, spelling: Spelling, vocabulary: int, histories: Histories) -> None:
        self.chat = chat
        self.histories = histories
        self.enabled = histories.config.splice_bytes > 0
        self.replies = Replies(histories.config.splice_bytes)
        self.splicer = Splicer(spelling, vocabulary)
        self.returns = Counter[Return]()
        self.replaced = 0
        self.reused = 0

    async def prepare(self, requests: Sequence[GenerationRequest], window: int) -> list[Faithful]:
        """Requests of one trajectory that came together; what would no longer fit the window stays as it is."""
        made: dict[tuple[int, ...], Faithful] = {}
        for request in requests:
            if request.prompt not in made:
                made[request.prompt] = await self._spliced(request, window)
        found = [made[request.prompt] for request in requests]
        return [
            replace(one, request=replace(request, prompt=one.request.prompt))
            for request, one in zip(requests, found, strict=True)
        ]

    def keep(self, heard: Heard, answer: Sequence[int]) -> None:
        """A client got an answer, or the beginning of one."""
        request = heard.request
        if not self.enabled or not request.rendered or not answer:
            return
        if self.histories.deletions.since(request.trajectory, request.received):
            return
        prompt, tokens = as_tokens(request.prompt), as_tokens(answer)
        before, reply = self.splicer.reply(prompt, tokens, heard.size, broken_off=not heard.ended)
        self.replies.add(request.trajectory, before, reply)

    def report(self, faithful: Faithful, report: Report) -> Report:
        """The report of a request, which says what was put in; counts the tokens that needed no computing for it."""
        if faithful.first is None:
            return report
        self.reused += max(0, report.cached_tokens - faithful.first)
        return replace(report, spliced=faithful.answers)

    def forget(self, scope: Scope, digests: frozenset[str]) -> bool:
        """Trajectories of a scope were deleted; whether anything was kept of them."""
        return self.replies.forget(scope, digests)

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges by metric name."""
        return {
            "splice_bytes": self.replies.bytes,
            **{f"returned_{how}_total": self.returns[how] for how in Return},
            "spliced_tokens_total": self.replaced,
            "spliced_cached_tokens_total": self.reused,
        }

    async def _spliced(self, request: GenerationRequest, window: int) -> Faithful:
        if not self.enabled or not request.rendered:
            return Faithful(request)
        if request.speculation.enabled and request.max_tokens > 0:
            await self._recover(request)
        if not self.histories.deletions.since(request.trajectory, request.received):
            self.replies.open(request.trajectory)
        known = self.replies.known(request.trajectory)
        if not any(known):
            return Faithful(request)
        spliced = self.splicer.splice(as_tokens(request.prompt), known)
        self.returns.update(spliced.returns)
        if spliced.first is None or spliced.tokens.size + min(1, request.max_tokens) > window:
            return Faithful(request)
        self.replaced += spliced.replaced
        return Faithful(replace(request, prompt=tuple(spliced.tokens.tolist())), spliced.answers, spliced.first)

    async def _recover(self, request: GenerationRequest) -> None:
        """Find answers of an earlier process in the histories of a trajectory that is new here, and of its parent."""
        trajectory, received = request.trajectory, request.received
        if trajectory not in self.replies:
            history = await self.histories.history(trajectory, received)
            await self._learn(trajectory, [one.view().copy() for one in history.conversations], received)
        if trajectory.parent is not None:
            parent = Trajectory(trajectory.parent, trajectory.scope)
            inherited = None if parent in self.replies else await self.histories.parent(trajectory, received)
            if inherited is not None:
                await self._learn(parent, [one.view().copy() for one in inherited.conversations], received)

    async def _learn(self, trajectory: Trajectory, documents: Sequence[Int32s], received: float) -> None:
        """Keep what stored conversations have of answers, unless their trajectory was deleted meanwhile."""
        found = await asyncio.to_thread(lambda: [pair for one in documents for pair in self._stored(one)])
        if not self.histories.deletions.since(trajectory, received):
            self.replies.open(trajectory)
            for before, reply in found:
                self.replies.add(trajectory, before, reply)

    def _stored(self, document: Int32s) -> Iterator[tuple[bytes, Reply]]:
        return self.splicer.stored(document, lambda text: self.chat.tokenize(text, special=False))
