"""The engine as the server sees it: a model loaded once, a thread that steps, async generators in front."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agentspec.cache.draft import compile_kernels
from agentspec.cache.retrieval import Histories
from agentspec.cache.session import HistorySession
from agentspec.cache.store import HistoryStore
from agentspec.config import Config
from agentspec.engine.chat import Chat
from agentspec.engine.commit import Completion
from agentspec.engine.cores import usable_cores
from agentspec.engine.grammar import Grammars
from agentspec.engine.job import Job
from agentspec.engine.kv import BLOCK, KVPool
from agentspec.engine.loop import StepLoop
from agentspec.engine.models import ensure
from agentspec.engine.profile import cost_table
from agentspec.engine.target import Target
from agentspec.engine.text import TextStream, TokenBytes
from agentspec.engine.wheels import Progress, silent
from agentspec.errors import ConfigError, ContextTooLong, InvalidRequest, Overloaded, Unavailable
from agentspec.policies.cost import LearnedCost
from agentspec.types import Delta, GenerationRequest

log = logging.getLogger(__name__)

LEAST_WINDOW = 2
"""A prompt of one token and one token after it."""


class Engine:
    """A `Worker` on a target model, with drafts from the histories. `load` makes one; `close` ends it."""

    def __init__(
        self, config: Config, target: Target, chat: Chat, end_tokens: frozenset[int], histories: Histories
    ) -> None:
        self.config = config
        self.chat = chat
        self.end_tokens = end_tokens
        self.histories = histories
        self.token_bytes_of = TokenBytes(chat.tokenizer)
        self.grammars = Grammars(chat.tokenizer, self.token_bytes_of, target.vocabulary, end_tokens)
        self.cost = LearnedCost(cost_table(target))
        self.loop = StepLoop(target, config.engine, self.cost)
        self._window = usable_window(config, target.window, self.loop.pool)
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @staticmethod
    def load(config: Config, *, store: HistoryStore | None = None, progress: Progress = silent) -> "Engine":
        """Fetch and convert the configured model where needed, load it, measure it, start the engine's thread."""
        torch.set_num_threads(config.model.threads or usable_cores())
        folder = ensure(config.model.name, config.model.home, progress=progress)
        compile_kernels()
        return Engine.from_folder(config, folder, Histories(config.cache, store))

    @staticmethod
    def from_folder(config: Config, folder: Path, histories: Histories) -> "Engine":
        """An engine on the model in `folder`."""
        target = Target.load(folder, config.model.dtype)
        chat = Chat.load(folder)
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

    def token_bytes(self, token: int) -> bytes:
        return self.token_bytes_of.names.get(token) or self.token_bytes_of[token]

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        request = self._checked(request)
        constraint = await self.grammars.constraint(request)
        session = await self._open_history(request)
        deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        job = self._job(request, session, sender(deltas, asyncio.get_running_loop()))
        job.constraint = constraint
        try:
            self._submit(job)
            while True:
                item = await deltas.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish:
                    return
        finally:
            job.cancelled = True
            with self._wake:
                self._wake.notify()
            if session is not None:
                session.close()

    def stats(self) -> Mapping[str, float]:
        if not self._thread.is_alive():
            raise Unavailable("the engine has stopped")
        return {**self.loop.stats(), **self.histories.stats()}

    async def close(self) -> None:
        """Fail what is running, end the thread, flush the histories."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self.grammars.close()
        await self.histories.close()

    def _checked(self, request: GenerationRequest) -> GenerationRequest:
        if not request.prompt:
            raise InvalidRequest("the prompt is empty", param="messages")
        room = self.window - len(request.prompt)
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {len(request.prompt)} tokens; the model's window of {self.window} "
                "must hold it and at least one more",
                param="messages",
            )
        self._check_tokens(request)
        return replace(request, max_tokens=min(request.max_tokens, room))

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
        if request.sampling.min_tokens > request.max_tokens:
            raise InvalidRequest(
                f"min_tokens: {request.sampling.min_tokens} is more than the {request.max_tokens} tokens asked for",
                param="min_tokens",
            )

    async def _open_history(self, request: GenerationRequest) -> HistorySession | None:
        if not request.speculation.enabled:
            return None
        allowed = request.speculation.drafters
        sources = None if allowed is None else frozenset(allowed)
        return await self.histories.open(request.trajectory, request.prompt, sources)

    def _job(
        self, request: GenerationRequest, session: HistorySession | None, send: Callable[[Delta | Exception], None]
    ) -> Job:
        reason = "no match in the history"
        if session is None:
            reason = "speculation is off for this request"
        elif min(request.speculation.max_draft_tokens, self.config.engine.max_draft_tokens) == 0:
            reason = "max_draft_tokens is 0"
        text = TextStream(self.token_bytes_of, request.stop)
        goes_on = request.ignore_eos and request.grammar is None
        own = frozenset() if goes_on else self.end_tokens
        completion = Completion(text, request.max_tokens, own.union(request.stop_tokens))
        return Job(request, completion, session, send, send, list(request.prompt), reason)

    def _submit(self, job: Job) -> None:
        with self._wake:
            if self._closing:
                raise Unavailable("the server is shutting down")
            if len(self._inbox) + len(self.loop.waiting) >= self.config.engine.max_queue:
                raise Overloaded(f"{self.config.engine.max_queue} requests are waiting already; retry later")
            self._inbox.append(job)
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
            self.loop.waiting.extend(self._inbox)
            self._inbox.clear()
        self.loop.fail_all(error)

    def _step_until_closing(self) -> None:
        while True:
            with self._wake:
                while self.loop.idle and not self._inbox and not self._closing:
                    self._wake.wait()
                self.loop.waiting.extend(self._inbox)
                self._inbox.clear()
                if self._closing:
                    return
            self.loop.step()


def usable_window(config: Config, most: int, pool: KVPool) -> int:
    """Tokens of the largest request that is taken; raises `ConfigError` when the memory for keys and values is too
    small for a prompt and one token."""
    wanted = min(config.model.window or most, most)
    if pool.limit < LEAST_WINDOW:
        raise ConfigError(
            f"AGENTSPEC_ENGINE_KV_BYTES is {config.engine.kv_bytes}: too small for any request, "
            f"as this model takes {pool.shape.token_bytes * BLOCK} bytes for each {BLOCK} tokens"
        )
    if wanted < LEAST_WINDOW:
        raise ConfigError(f"AGENTSPEC_MODEL_WINDOW must be at least {LEAST_WINDOW} or 0, got {wanted}")
    if pool.limit < wanted:
        log.warning("AGENTSPEC_ENGINE_KV_BYTES limits the window to %d of %d tokens", pool.limit, wanted)
    return min(wanted, pool.limit)


def sender(
    queue: "asyncio.Queue[Delta | Exception]", loop: asyncio.AbstractEventLoop
) -> Callable[[Delta | Exception], None]:
    """Puts into a queue of an event loop from the engine's thread; does nothing once that loop is closed."""

    def send(item: Delta | Exception) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:
            log.debug("the caller's event loop is closed")

    return send
