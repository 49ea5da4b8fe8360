"""A small real worker that plays a script of deltas, and ways to talk to an app in process."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from agentspec.config import ServerConfig
from agentspec.errors import ContextTooLong
from agentspec.server.app import create_app
from agentspec.types import Delta, FinishReason, GenerationRequest, Report, TokenLogprob, Trajectory, TrajectoryState

REPORT = Report(
    prompt_tokens=0,
    cached_tokens=2,
    completion_tokens=0,
    steps=2,
    drafted={"trajectory": 4, "scope": 1},
    accepted={"trajectory": 3, "scope": 0},
    drafted_total=5,
    accepted_total=3,
    queue_s=0.001,
    prefill_s=0.01,
    decode_s=0.02,
    decode_tokens=0,
    draft_s=0.003,
    token_ids=(1, 2, 3),
)


@dataclass
class ScriptedWorker:
    """Says each text of `script`, one token each, after `delay_s` seconds; `failure` is raised after `fail_after`."""

    script: Sequence[str] = ("Hello", " world")
    finish: FinishReason = FinishReason.STOP
    delay_s: float = 0.0
    failure: Exception | None = None
    fail_after: int = 0
    model: str = "served"
    window: int = 10_000
    requests: list[GenerationRequest] = field(default_factory=list)
    rendered: list[tuple[list[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]] = field(default_factory=list)
    running: int = 0
    closed_early: int = 0
    ended: bool = False
    known: dict[Trajectory, TrajectoryState] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        self.rendered.append((list(messages), tools))
        text = "".join(str(message["content"]) for message in messages)
        return tuple(range(len(text)))

    @property
    def vocabulary(self) -> int:
        return 100

    @property
    def control_tokens(self) -> Collection[int]:
        return {99}

    def tokenize(self, text: str, *, special: bool) -> tuple[int, ...]:
        """A token for each byte that is worth less than 99, behind one that opens every text."""
        return (99,) * special + tuple(byte % 99 for byte in text.encode())

    async def generate(self, *requests: GenerationRequest) -> AsyncIterator[Delta]:
        """The requests in turns, a delta each."""
        sources = {index: self.generate_one(request) for index, request in enumerate(requests)}
        try:
            while sources:
                for index, source in list(sources.items()):
                    delta = await anext(source)
                    yield replace(delta, index=index)
                    if delta.finish is not None:
                        await sources.pop(index).aclose()
        finally:
            for source in sources.values():
                await source.aclose()

    async def generate_one(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        if len(request.prompt) + min(1, request.max_tokens) > self.window:
            raise ContextTooLong(f"the prompt has {len(request.prompt)} tokens, the window {self.window}")
        self.running += 1
        complete = False
        try:
            pieces = self.script[: request.max_tokens]
            if request.prompt_logprobs is not None:
                yield Delta("", 0, prompt_logprobs=self.prompt_logprobs_of(request, request.prompt_logprobs))
            for index, text in enumerate(pieces):
                if self.failure is not None and index == self.fail_after:
                    raise self.failure
                await asyncio.sleep(self.delay_s)
                yield Delta(text, 1, logprobs=self.logprobs_of(index, request))
            if self.failure is not None:
                raise self.failure
            complete = True
            finish = self.finish if len(pieces) == len(self.script) else FinishReason.LENGTH
            counts = replace(
                REPORT, prompt_tokens=len(request.prompt), completion_tokens=len(pieces), decode_tokens=len(pieces)
            )
            yield Delta("", 0, finish, counts)
        finally:
            self.running -= 1
            self.closed_early += not complete

    def logprobs_of(self, index: int, request: GenerationRequest) -> tuple[TokenLogprob, ...]:
        """The token, and from the second place on tokens that could not have come."""
        if request.logprobs is None:
            return ()
        others = [(index + place, -0.5 if place == 0 else float("-inf")) for place in range(request.logprobs)]
        return (TokenLogprob(index, -0.5, tuple(others), 1),)

    def prompt_logprobs_of(self, request: GenerationRequest, top: int) -> tuple[TokenLogprob, ...]:
        """Each token is second to those that were likelier: the tokens 0 and up."""
        likeliest = tuple((token, -0.25 - token) for token in range(top))
        return tuple(TokenLogprob(token, -9.0, likeliest, 7) for token in request.prompt[1:])

    def token_bytes(self, token: int) -> bytes:
        return self.script[token].encode() if token < len(self.script) else b"\xff"

    async def inspect(self, trajectory: Trajectory) -> TrajectoryState | None:
        return self.known.get(trajectory)

    async def forget(self, trajectory: Trajectory) -> bool:
        if self.failure is not None:
            raise self.failure
        return self.known.pop(trajectory, None) is not None

    async def close(self) -> None:
        self.ended = True

    def stats(self) -> Mapping[str, float]:
        return {"steps_total": 7, "running": self.running, **self.gauges}


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def client_of(worker: ScriptedWorker, config: ServerConfig | None = None) -> httpx.AsyncClient:
    """A client of a fresh app."""
    transport = httpx.ASGITransport(create_app(worker, config or ServerConfig()))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def post(
    worker: ScriptedWorker, body: Any, headers: Mapping[str, str] | None = None, path: str = CHAT
) -> httpx.Response:
    """One request to a fresh app; bytes are sent as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(worker, "POST", path, content=content, headers=headers)


def send(
    worker: ScriptedWorker,
    method: str,
    path: str,
    *,
    content: bytes | AsyncIterator[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
    config: ServerConfig | None = None,
) -> httpx.Response:
    async def once() -> httpx.Response:
        async with client_of(worker, config) as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(once())


def ask(**fields: Any) -> dict[str, Any]:
    """A valid request with some fields of its own."""
    return {"messages": HELLO, **fields}


def events(response: httpx.Response) -> list[Any]:
    """The parsed events of a stream that ends with [DONE]."""
    frames = [frame for frame in response.text.split("\n\n") if frame and not frame.startswith(":")]
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The content of an error envelope, checked for shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    return dict(body["error"])
