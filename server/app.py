"""The HTTP application: routes from a worker, wrapped in error answers and access counts."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentspec.config import ServerConfig
from agentspec.errors import NotFound, UnknownModel
from agentspec.server.access import Access
from agentspec.server.answer import Answer, Frame, encode, now
from agentspec.server.body import parse_object, read_body
from agentspec.server.chat_answer import ChatAnswer
from agentspec.server.constrain import grammar_of, schema_of
from agentspec.server.convert import (
    Prompt,
    fold_system,
    generation_requests,
    outline_of,
    plain_messages,
    plain_tools,
    prediction_of,
    prompts_of,
)
from agentspec.server.failures import Failures, error_response, routing_error
from agentspec.server.generation import Generation
from agentspec.server.identity import Identity
from agentspec.server.metrics import Metrics
from agentspec.server.options import (
    NEUTRAL,
    NEUTRAL_FOR_CHAT,
    NEUTRAL_FOR_TEXT,
    check_choices,
    check_text,
    check_tools,
    refuse_unsupported,
)
from agentspec.server.respond import EventStream, WholeAnswer
from agentspec.server.text_answer import TextAnswer
from agentspec.server.text_logprobs import Speller
from agentspec.server.tokens import detokenized, tokenized
from agentspec.server.wire import ChatRequest, Generating, TextRequest, parse_request, unknown_fields
from agentspec.types import Grammar, Outline, Trajectory, Worker

log = logging.getLogger(__name__)

MAX_NAMES_LOGGED = 256
DEGRADED = {
    "store_breaker_open": "the store of histories does not answer",
    "store_file_behind": "the file of histories cannot be written",
}
"""Gauges of the worker that say that it goes on without a part of it."""

KNOWN = {*NEUTRAL, *NEUTRAL_FOR_CHAT, *NEUTRAL_FOR_TEXT}


def create_app(worker: Worker, config: ServerConfig) -> Starlette:
    """The application that serves `worker` and closes it at its own end.

    Holds no other state than metrics and the memory of conversations.
    """
    service = Service(worker, config)
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.text, methods=["POST"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/detokenize", service.detokenize, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/trajectories", service.trajectory, methods=["GET", "DELETE"]),
        Route("/v1/trajectories/{id:path}", service.trajectory, methods=["GET", "DELETE"]),
        Route("/health", service.health),
        Route("/ready", service.ready),
        Route("/metrics", service.show_metrics),
    ]
    middleware = [Middleware(Access, service.metrics, routes), Middleware(Failures)]
    handlers: Any = {HTTPException: not_routed}

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await worker.close()

    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


async def not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(routing_error(request.method, request.url.path, error), error.headers)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All of a request that can be known before it is given to the worker."""

    asked: Generating
    prompts: Sequence[Prompt]
    grammar: Grammar | None
    answer: Callable[[Frame], Answer]
    digests: Sequence[bytes] = ()
    outline: Outline = field(default_factory=Outline)
    prediction: Prompt | None = None
    """None where none was given."""

    rendered: bool = False
    """The prompt is made of messages."""


class Service:
    """The routes."""

    def __init__(self, worker: Worker, config: ServerConfig) -> None:
        self.metrics = Metrics(worker.stats)
        self._worker = worker
        self._config = config
        self._identity = Identity(worker.model)
        self._created = now()
        self._logged: set[str] = set()

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_chat)

    async def text(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_text)

    async def _generate(self, request: Request, prepare: Callable[[bytes], Prepared]) -> Response:
        body = await read_body(request, self._config.max_body_bytes, self._config.receive_s)
        with self._identity.receiving() as received:
            prepared = await asyncio.to_thread(prepare, body)
            asked = prepared.asked
            trajectory = self._identity.resolve(request.headers, asked, prepared.digests, received)
        made = generation_requests(asked, prepared.prompts, trajectory, self._worker.window, prepared.grammar)
        outline, prediction = prepared.outline, prepared.prediction or ()
        more: dict[str, Any] = {"outline": outline, "prediction": prediction, "rendered": prepared.rendered}
        wanted = [replace(one, received=received, **more) for one in made]
        started = request.scope["agentspec.started"]
        generation = Generation(self._worker.generate(*wanted), request.receive, self.metrics, started)
        frame = Frame(
            self._worker.model,
            trajectory,
            prompts=len(prepared.prompts),
            n=asked.n,
            with_usage=asked.stream_options.include_usage,
            with_report=asked.speculation.report,
            with_prediction=prepared.prediction is not None,
        )
        answer = prepared.answer(frame)
        if asked.stream:
            return EventStream(generation, answer, self._config.keepalive_s)
        return WholeAnswer(generation, answer)

    async def tokenize(self, request: Request) -> Response:
        return await self._converted(request, tokenized)

    async def detokenize(self, request: Request) -> Response:
        return await self._converted(request, detokenized)

    async def _converted(self, request: Request, convert: Callable[[dict[str, Any], Worker], Any]) -> Response:
        """What `convert` makes of the body, in a thread because long texts take long."""
        body = await read_body(request, self._config.max_body_bytes, self._config.receive_s)

        def converted() -> Any:
            raw = parse_object(body)
            made = convert(raw, self._worker)
            if raw.get("model") is not None:
                self._check_model(raw["model"])
            return made

        return json_response(await asyncio.to_thread(converted))

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return json_response(self._model_object())

    async def trajectory(self, request: Request) -> Response:
        """What is kept of a trajectory, or its deletion."""
        found = self._identity.named(request.path_params.get("id", ""))
        return await (self._forget(found) if request.method == "DELETE" else self._show(found))

    async def _show(self, found: Trajectory) -> Response:
        state = await self._worker.inspect(found)
        if state is None:
            raise NotFound(f"there is no trajectory {found.id!r}", param="id")
        return json_response({"id": found.id, "object": "trajectory", "model": self._worker.model, **asdict(state)})

    async def _forget(self, found: Trajectory) -> Response:
        """Deletes all that is kept of a trajectory, and of requests of it that were received before."""
        recognised = self._identity.forget(found)
        if not await self._worker.forget(found) and not recognised:
            raise NotFound(f"there is no trajectory {found.id!r}", param="id")
        return json_response({"id": found.id, "object": "trajectory.deleted", "deleted": True})

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A worker that is gone answers this with its own error."""
        stats = self._worker.stats()
        degraded = [what for gauge, what in DEGRADED.items() if stats.get(gauge)]
        return json_response({"status": "ready", "degraded": degraded} if degraded else {"status": "ready"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _prepare_chat(self, body: bytes) -> Prepared:
        """Parses, checks and renders; runs in a thread because long prompts take long."""
        raw = parse_object(body)
        asked = parse_request(ChatRequest, raw)
        refuse_unsupported(raw, NEUTRAL_FOR_CHAT)
        check_tools(asked)
        grammar = self._checked(asked)
        tools, messages = plain_tools(asked), plain_messages(asked.messages)
        prompt = self._worker.render(fold_system(messages), tools)
        token_bytes = self._worker.token_bytes if asked.logprobs else None
        answer = partial(ChatAnswer, with_tools=tools is not None, token_bytes=token_bytes)
        digests = self._identity.digests(asked, tools, messages)
        outline = outline_of(tools, schema_of(asked, grammar))
        prediction = None if asked.prediction is None else prediction_of(asked, self._worker)
        return Prepared(asked, [prompt], grammar, answer, digests, outline, prediction, rendered=True)

    def _prepare_text(self, body: bytes) -> Prepared:
        """Parses, checks and tokenizes; runs in a thread too."""
        raw = parse_object(body)
        asked = parse_request(TextRequest, raw)
        refuse_unsupported(raw, NEUTRAL_FOR_TEXT)
        check_text(asked)
        grammar = self._checked(asked)
        prompts = prompts_of(asked, self._worker)
        speller = Speller(self._worker.token_bytes, self._worker.control_tokens)
        return Prepared(asked, prompts, grammar, partial(TextAnswer, asked=asked, prompts=prompts, speller=speller))

    def _checked(self, asked: Generating) -> Grammar | None:
        """The grammar of a request whose options go together."""
        check_choices(asked)
        grammar = grammar_of(asked)
        if asked.model is not None:
            self._check_model(asked.model)
        self._log_unknown(asked)
        return grammar

    def _check_model(self, name: str) -> None:
        if name != self._worker.model:
            raise UnknownModel(f"{name!r:.100} is not served here; the model is {self._worker.model!r}", param="model")

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._worker.model,
            "object": "model",
            "created": self._created,
            "owned_by": "agentspec",
            "context_window": self._worker.window,
        }

    def _log_unknown(self, asked: Generating) -> None:
        """Names each ignored field once."""
        for name in unknown_fields(asked):
            if name not in KNOWN and name not in self._logged and len(self._logged) < MAX_NAMES_LOGGED:
                self._logged.add(name)
                log.warning("ignored an unknown field: %.100r", name)


def json_response(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
