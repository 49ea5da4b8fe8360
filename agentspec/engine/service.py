"""The engine as the server sees it: a model loaded once, a thread that steps, async generators in front."""

import asyncio
import hashlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from agentspec.cache import local
from agentspec.cache.codec import digest_of
from agentspec.cache.draft import compile_kernels
from agentspec.cache.prediction import Prediction, PredictionGuide
from agentspec.cache.retrieval import Histories
from agentspec.cache.scaffold import ScaffoldGuide
from agentspec.cache.session import HistorySession, compile_guides
from agentspec.cache.store import HistoryStore
from agentspec.config import Config
from agentspec.engine.chat import Chat
from agentspec.engine.commit import Completion
from agentspec.engine.cores import usable_cores
from agentspec.engine.corpora import load_corpora
from agentspec.engine.devices import load_target
from agentspec.engine.fidelity import Fidelity, Heard
from agentspec.engine.grammar import Grammars
from agentspec.engine.job import Job
from agentspec.engine.loop import StepLoop
from agentspec.engine.models import ensure
from agentspec.engine.prefix import KVPool
from agentspec.engine.profile import stored_cost_table
from agentspec.engine.reasons import reason_of
from agentspec.engine.scaffolds import Scaffolds
from agentspec.engine.target import AnyTarget
from agentspec.engine.text import TextStream, TokenBytes
from agentspec.engine.wheels import Progress, silent
from agentspec.errors import ConfigError, ContextTooLong, InvalidRequest, Overloaded, Unavailable
from agentspec.kernels.cpu.attend import PAGE
from agentspec.policies.cost import LearnedCost
from agentspec.types import Delta, GenerationRequest, Scope, Trajectory, TrajectoryState

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LEAST_WINDOW = 2
"""A prompt of one token and one token after it."""


class Engine:
    """A `Worker` on a target model, with drafts from the histories. `load` makes one; `close` ends it."""

    def __init__(
        self, config: Config, target: AnyTarget, chat: Chat, end_tokens: frozenset[int], histories: Histories
    ) -> None:
        self.config = config
        self.chat = chat
        self.end_tokens = end_tokens
        self.histories = histories
        self.token_bytes_of = TokenBytes(chat.tokenizer)
        self.grammars = Grammars(chat.tokenizer, self.token_bytes_of, target.vocabulary, end_tokens)
        self.scaffolds = Scaffolds(chat, config.cache)
        self.fidelity = Fidelity(chat, self.token_bytes_of, target.vocabulary, histories)
        self.cost = LearnedCost(stored_cost_table(target, profile_of(config)))
        self.loop = StepLoop(target, config.engine, self.cost)
        self._window = usable_window(config, target.window, self.loop.pool)
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._errands: list[Callable[[], None]] = []
        """What the engine's thread is to do between two steps."""

        histories.on_forgotten = self._forget_pages
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @staticmethod
    def load(config: Config, *, store: HistoryStore | None = None, progress: Progress = silent) -> "Engine":
        """Fetch and convert the configured model where needed, load it, measure it, start the engine's thread."""
        torch.set_num_threads(config.model.threads or usable_cores())
        folder = ensure(config.model.name, config.model.home, progress=progress)
        compile_kernels()
        compile_guides()
        local.compile_kernels()
        return Engine.from_folder(config, folder, Histories(config.cache, store))

    @staticmethod
    def from_folder(config: Config, folder: Path, histories: Histories) -> "Engine":
        """An engine on the model in `folder`."""
        chat = Chat.load(folder)
        histories.corpora = load_corpora(config, chat)
        target = load_target(folder, config)
        model: Any = target.model
        ends = chat.end_tokens(model.config.eos_token_id, getattr(model.generation_config, "eos_token_id", None))
        return Engine(config, target, chat, ends, histories)

    @property
    def model(self) -> str:
        return Path(self.config.model.name).name

    @property
    def window(self) -> int:
        return self._window

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        return self.chat.render(messages, tools)

    @property
    def vocabulary(self) -> int:
        return self.loop.target.vocabulary

    @property
    def control_tokens(self) -> Collection[int]:
        return self.token_bytes_of.names.keys()

    def tokenize(self, text: str, *, special: bool) -> tuple[int, ...]:
        return self.chat.tokenize(text, special=special)

    def token_bytes(self, token: int) -> bytes:
        return self.token_bytes_of.names.get(token) or self.token_bytes_of[token]

    async def generate(self, *requests: GenerationRequest) -> AsyncIterator[Delta]:
        faithful = await self.fidelity.prepare(requests, self.window)
        checked = [self._checked(one.request) for one in faithful]
        heard = [Heard(request) for request in checked]
        for request in checked:
            if self._drafts(request):
                self.histories.follow(request.trajectory.scope)
        deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        sessions: list[HistorySession] = []
        jobs: list[Job] = []
        try:
            predictions = {request.prediction: await predicted(request) for request in checked}
            for index, request in enumerate(checked):
                constraint = await self.grammars.constraint(request)
                session = await self._open_history(request)
                if session is not None:
                    sessions.append(session)
                    self._guide(session, request, predictions[request.prediction])
                job = self._job(request, session, sender(deltas, asyncio.get_running_loop(), index))
                job.constraint = constraint
                jobs.append(job)
            self._submit(jobs)
            unfinished = len(jobs)
            while unfinished:
                item = await deltas.get()
                if isinstance(item, Exception):
                    raise item
                heard[item.index].add(item)
                if item.report is not None:
                    self.fidelity.keep(heard[item.index], item.report.token_ids)
                    item = replace(item, report=self.fidelity.report(faithful[item.index], item.report))
                yield item
                unfinished -= item.finish is not None
        finally:
            for job, got in zip(jobs, heard, strict=False):
                job.cancelled = True
                if not got.ended:
                    self.fidelity.keep(got, job.completion.tokens[: got.tokens])
            with self._wake:
                self._wake.notify()
            for session in sessions:
                session.close()

    async def inspect(self, trajectory: Trajectory) -> TrajectoryState | None:
        owner = (trajectory.scope, trajectory.id)
        kept = await asyncio.wrap_future(self._errand(lambda: self.loop.pool.bytes_of(owner)))
        state = await self.histories.inspect(trajectory)
        replies = self.fidelity.replies.bytes_of(trajectory)
        if state is None:
            return TrajectoryState(0, 0, 0.0, replies, 0, kept, 0, 0) if kept or replies else None
        return replace(state, memory_bytes=state.memory_bytes + replies, kv_bytes=kept)

    async def forget(self, trajectory: Trajectory) -> bool:
        digest = digest_of(trajectory)
        self.histories.deletions.note(digest)
        self.scaffolds.forget(trajectory.scope)
        replies = self.fidelity.forget(trajectory.scope, frozenset({digest}))
        pages = await asyncio.wrap_future(self._errand(lambda: self.loop.forget(trajectory.scope, {digest})))
        history = await self.histories.delete(trajectory)
        if history is None:
            raise Unavailable("the store of histories did not confirm the deletion, which goes on; ask again")
        return replies or pages or history

    def _forget_pages(self, scope: Scope, digests: frozenset[str]) -> None:
        """Another process deleted trajectories."""
        self.scaffolds.forget(scope)
        self.fidelity.forget(scope, digests)
        with suppress(Unavailable):
            self._errand(lambda: self.loop.forget(scope, digests))

    def _errand(self, act: Callable[[], Answer]) -> "Future[Answer]":
        """What `act` gives on the engine's thread, between two steps."""
        future: Future[Answer] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            if self._closing:
                raise Unavailable("the server is shutting down")
            self._errands.append(run)
            self._wake.notify()
        return future

    def stats(self) -> Mapping[str, float]:
        if not self._thread.is_alive():
            raise Unavailable("the engine has stopped")
        own = {"scaffold_bytes": self.scaffolds.bytes, **self.fidelity.stats()}
        return {**self.loop.stats(), **self.histories.stats(), **own}

    async def close(self) -> None:
        """Fail what is running, end the thread, flush the histories."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self.grammars.close()
        await asyncio.to_thread(self.scaffolds.close)
        await self.histories.close()

    def _checked(self, request: GenerationRequest) -> GenerationRequest:
        if not request.prompt:
            raise InvalidRequest("the prompt is empty", param="messages")
        room = self.window - len(request.prompt)
        if room < min(1, request.max_tokens):
            raise ContextTooLong(
                f"the prompt has {len(request.prompt)} tokens; the model's window of {self.window} "
                "must hold it and at least one more",
                param="messages",
            )
        self._check_tokens(request)
        speculation = request.speculation
        if speculation.exact and not self.loop.target.exact:
            speculation = replace(speculation, enabled=False)
        return replace(request, max_tokens=min(request.max_tokens, room), speculation=speculation)

    def _check_tokens(self, request: GenerationRequest) -> None:
        """Raises `InvalidRequest` for token ids that the model does not have, and for a minimum above the maximum."""
        vocabulary = self.loop.target.vocabulary
        biased = [token for token, _ in request.sampling.logit_bias]
        for param, tokens in (("logit_bias", biased), ("stop_token_ids", request.stop_tokens)):
            for token in tokens:
                if not 0 <= token < vocabulary:
                    raise InvalidRequest(
                        f"{param}: the model's tokens are below {vocabulary}, got {token}", param=param
                    )
        if len(request.prediction) > self.window:
            raise ContextTooLong(
                f"prediction: has {len(request.prediction)} tokens; the model's window holds {self.window}",
                param="prediction",
            )
        if request.sampling.min_tokens > request.max_tokens:
            raise InvalidRequest(
                f"min_tokens: {request.sampling.min_tokens} is more than the {request.max_tokens} tokens asked for",
                param="min_tokens",
            )

    async def _open_history(self, request: GenerationRequest) -> HistorySession | None:
        if not self._drafts(request):
            return None
        allowed = request.speculation.drafters
        sources = None if allowed is None else frozenset(allowed)
        start = self.histories.branch if request.branch else self.histories.open
        return await start(request.trajectory, request.prompt, sources, request.received)

    def _drafts(self, request: GenerationRequest) -> bool:
        """Whether a request reads histories, and adds to them."""
        return request.speculation.enabled and request.max_tokens > 0

    def _guide(self, session: HistorySession, request: GenerationRequest, prediction: Prediction | None) -> None:
        """Give a session what its request says of the answer; no scaffold where its trajectory was deleted meanwhile,
        as that would stay."""
        gone = self.histories.deletions.since(request.trajectory, request.received)
        scaffold = None if gone else self.scaffolds.find(request.trajectory.scope, request.outline)
        if scaffold is not None:
            session.guides.append(ScaffoldGuide(scaffold, request.prompt))
        if prediction is not None:
            session.guides.append(PredictionGuide(prediction))

    def _job(
        self, request: GenerationRequest, session: HistorySession | None, send: Callable[[Delta | Exception], None]
    ) -> Job:
        reason = reason_of(request, self.config.engine.max_draft_tokens, exact=self.loop.target.exact)
        text = TextStream(self.token_bytes_of, request.stop)
        goes_on = request.ignore_eos and request.grammar is None
        own = frozenset() if goes_on else self.end_tokens
        completion = Completion(text, request.max_tokens, own.union(request.stop_tokens))
        return Job(request, completion, session, send, send, list(request.prompt), reason)

    def _submit(self, jobs: Sequence[Job]) -> None:
        """Queues jobs that came together, which take one place of the queue; of those with the same prompt the first
        one leads."""
        leaders: dict[tuple[int, ...], Job] = {}
        for job in jobs:
            leader = leaders.setdefault(job.request.prompt, job)
            job.leader = None if leader is job else leader
            job.forgotten = self.histories.deletions.since(job.request.trajectory, job.request.received)
        with self._wake:
            if self._closing:
                raise Unavailable("the server is shutting down")
            if len(self._inbox) + len(self.loop.scheduler.waiting) >= self.config.engine.max_queue:
                raise Overloaded(f"{self.config.engine.max_queue} requests are waiting already; retry later")
            self._inbox.extend(jobs)
            self._wake.notify()

    def _run(self) -> None:
        """The engine's thread: steps until it is told to close. However it ends, nobody is left waiting."""
        error = Unavailable("the server is shutting down")
        try:
            self._step_until_closing()
        except Exception:
            log.exception("the engine stopped")
            error = Unavailable("the engine has stopped")
        with self._wake:
            self._closing = True
            self._take_in()
        self.loop.fail_all(error)

    def _take_in(self) -> None:
        for job in self._inbox:
            self.loop.add(job)
        self._inbox.clear()
        errands, self._errands = self._errands, []
        for errand in errands:
            errand()

    def _step_until_closing(self) -> None:
        while True:
            with self._wake:
                while self.loop.idle and not (self._inbox or self._errands or self._closing):
                    self._wake.wait()
                self._take_in()
                if self._closing:
                    return
            self.loop.step()


async def predicted(request: GenerationRequest) -> Prediction | None:
    """The prediction of a request, indexed in a thread; None where it has none, or no drafts."""
    if not request.prediction or not request.speculation.enabled:
        return None
    return await asyncio.to_thread(Prediction, request.prediction)


def profile_of(config: Config) -> Path:
    """The file of what passes of the configured model cost here."""
    name = config.model.name
    digest = hashlib.sha256(str(Path(name).absolute() if Path(name).exists() else name).encode()).hexdigest()[:16]
    return config.model.home / "profiles" / f"{Path(name).name}-{config.model.dtype}-{digest}.json"


def usable_window(config: Config, most: int, pool: KVPool) -> int:
    """Tokens of the largest request that is taken; raises `ConfigError` when the memory for keys and values is too
    small for a prompt and one token."""
    wanted = min(config.model.window or most, most)
    if pool.limit < 1:
        raise ConfigError(
            f"AGENTSPEC_ENGINE_KV_BYTES is {config.engine.kv_bytes}: too small for any request, "
            f"as this model takes {pool.shape.page_bytes} bytes for each {PAGE} tokens"
        )
    if wanted < LEAST_WINDOW:
        raise ConfigError(f"AGENTSPEC_MODEL_WINDOW must be at least {LEAST_WINDOW} or 0, got {wanted}")
    held = pool.limit * PAGE
    if held < wanted:
        log.warning("AGENTSPEC_ENGINE_KV_BYTES limits the window to %d of %d tokens", held, wanted)
    return min(wanted, held)


def sender(
    queue: "asyncio.Queue[Delta | Exception]", loop: asyncio.AbstractEventLoop, index: int
) -> Callable[[Delta | Exception], None]:
    """Puts what request `index` gets into a queue of an event loop from the engine's thread; does nothing once that
    loop is closed."""

    def send(item: Delta | Exception) -> None:
        if index and isinstance(item, Delta):
            item = replace(item, index=index)
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:
            log.debug("the caller's event loop is closed")

    return send
