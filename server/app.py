"""The HTTP application: routes from a worker, wrapped in error answers and access counts."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentspec.config import ServerConfig
from agentspec.errors import UnknownModel
from agentspec.server.access import Access
from agentspec.server.answer import Answer, encode, now
from agentspec.server.body import parse_object, read_body
from agentspec.server.constrain import grammar_of
from agentspec.server.convert import fold_system, generation_request, plain_messages, plain_tools
from agentspec.server.failures import Failures, error_response, routing_error
from agentspec.server.generation import Generation
from agentspec.server.identity import Identity
from agentspec.server.metrics import Metrics
from agentspec.server.options import NEUTRAL, check_choices, refuse_unsupported
from agentspec.server.respond import EventStream, WholeAnswer
from agentspec.server.wire import ChatRequest, parse_chat, unknown_fields
from agentspec.types import Grammar, Worker

log = logging.getLogger(__name__)

MAX_NAMES_LOGGED = 256


def create_app(worker: Worker, config: ServerConfig) -> Starlette:
    """The application that serves `worker` and closes it at its own end.

    Holds no other state than metrics and the memory of conversations.
    """
    service = Service(worker, config)
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/health", service.health),
        Route("/ready", service.ready),
        Route("/metrics", service.show_metrics),
    ]
    paths = frozenset(route.path for route in routes if "{" not in route.path)
    middleware = [Middleware(Access, service.metrics, paths), Middleware(Failures)]
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
    """All of a chat request that can be known before it is given to the worker."""

    asked: ChatRequest
    prompt: tuple[int, ...]
    digests: list[bytes]
    with_tools: bool
    grammar: Grammar | None


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
        body = await read_body(request, self._config.max_body_bytes)
        prepared = await asyncio.to_thread(self._prepare, body)
        asked = prepared.asked
        trajectory = self._identity.resolve(request.headers, asked, prepared.digests)
        wanted = generation_request(asked, prepared.prompt, trajectory, self._worker.window, prepared.grammar)
        started = request.scope["agentspec.started"]
        generation = Generation(self._worker.generate(wanted), request.receive, self.metrics, started)
        answer = Answer(
            self._worker.model,
            trajectory,
            asked.stream_options.include_usage,
            with_report=asked.speculation.report,
            token_bytes=self._worker.token_bytes if asked.logprobs else None,
        )
        if asked.stream:
            return EventStream(generation, answer, prepared.with_tools, self._config.keepalive_s)
        return WholeAnswer(generation, answer, prepared.with_tools)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return json_response(self._model_object())

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A worker that is gone answers this with its own error."""
        self._worker.stats()
        return json_response({"status": "ready"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _prepare(self, body: bytes) -> Prepared:
        """Parses, checks and renders; runs in a thread because long prompts take long."""
        raw = parse_object(body)
        asked = parse_chat(raw)
        refuse_unsupported(raw)
        check_choices(asked)
        grammar = grammar_of(asked)
        if asked.model is not None:
            self._check_model(asked.model)
        self._log_unknown(asked)
        tools, messages = plain_tools(asked), plain_messages(asked.messages)
        prompt = self._worker.render(fold_system(messages), tools)
        return Prepared(asked, prompt, self._identity.digests(asked, tools, messages), tools is not None, grammar)

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

    def _log_unknown(self, asked: ChatRequest) -> None:
        """Names each ignored field once."""
        for name in unknown_fields(asked):
            if name not in NEUTRAL and name not in self._logged and len(self._logged) < MAX_NAMES_LOGGED:
                self._logged.add(name)
                log.warning("ignored an unknown field: %.100r", name)


def json_response(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
