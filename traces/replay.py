"""Has a server generate every recorded assistant turn again, from the recorded messages before it.

What is measured is the server's own work on real prompts: the recorded turn is never compared with the new one, and
the next prompt is again the recorded one, so every run sends the same prompts. In a baseline run each turn is sent
twice, with speculation off and on, and which goes first alternates. Histories of an earlier replay on the same server
would help a later one: compare on servers that were started fresh.
"""

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentspec.errors import ReplayError
from agentspec.traces.client import Answer, ChatClient, PromptTooLong
from agentspec.traces.measure import TurnResult
from agentspec.traces.options import ReplayOptions
from agentspec.traces.schema import Trace, Turn

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
CHARACTERS_PER_TOKEN = 4
ID_LENGTH = 150
TRAJECTORY_HEADER = "X-AgentSpec-Trajectory"


@dataclass(slots=True)
class Replayed:
    """What came of a replay."""

    model: str
    trajectories: dict[str, list[TurnResult]] = field(default_factory=dict)
    """Turns by trajectory id, in the order of the traces."""

    skipped: dict[str, int] = field(default_factory=dict)
    """Turns that were not replayed, by trajectory id."""


Progress = Callable[[int, int], None]
"""Told how many turns are done and how many there are."""


def quiet(done: int, total: int) -> None:
    """The progress that shows nothing."""


async def replay(
    traces: Sequence[Trace],
    url: str,
    options: ReplayOptions,
    *,
    progress: Progress = quiet,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Replayed:
    """Replays traces against the server at `url`; raises `ReplayError` at the first answer that is not whole.

    Turns whose prompt does not fit are skipped and counted. `transport` replaces the network in tests.
    """
    plan = [(trace, list(trace.turns())[: options.turns]) for trace in traces]
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        raise ReplayError("--api-key must be printable ASCII")
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    async with httpx.AsyncClient(
        base_url=base_url(url), headers=headers, timeout=timeout, transport=transport, trust_env=False
    ) as http:
        client = ChatClient(http)
        run = Run(
            client, options, options.model or await client.model(), sum(len(turns) for _, turns in plan), progress
        )
        run.result.trajectories.update({trace.id: [] for trace in traces})
        run.result.skipped.update({trace.id: 0 for trace in traces})
        await run.all(plan)
    return run.result


class Run:
    """The state of one replay."""

    def __init__(self, client: ChatClient, options: ReplayOptions, model: str, total: int, progress: Progress) -> None:
        self.result = Replayed(model)
        self._client = client
        self._options = options
        self._nonce = secrets.token_hex(6)
        self._total = total
        self._done = 0
        self._progress = progress

    async def all(self, plan: Sequence[tuple[Trace, Sequence[Turn]]]) -> None:
        """Replays trajectories, as many at a time as there are clients; the first failure stops the others."""
        self._progress(0, self._total)
        waiting = iter(plan)

        async def work() -> None:
            for trace, turns in waiting:
                await self._trajectory(trace, turns)

        workers = [asyncio.create_task(work()) for _ in range(min(self._options.clients, len(plan)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _trajectory(self, trace: Trace, turns: Sequence[Turn]) -> None:
        for position, turn in enumerate(turns):
            try:
                result = await self._turn(turn, off_first=position % 2 == 0)
            except PromptTooLong:
                result = None
            except ReplayError as error:
                raise ReplayError(f"{trace.id}, messages[{turn.index}]: {error.message}") from error
            if result is None:
                self.result.skipped[trace.id] += 1
            else:
                self.result.trajectories[trace.id].append(result)
            self._done += 1
            self._progress(self._done, self._total)

    async def _turn(self, turn: Turn, off_first: bool) -> TurnResult | None:
        request = request_of(turn, self.result.model, self._options)
        limit = self._options.max_prompt_tokens
        if limit is not None and len(request) > limit * CHARACTERS_PER_TOKEN:
            return None
        if not self._options.baseline:
            answer, digest = await self._send(turn, request, self._options.speculation)
            return TurnResult(turn.trace.id, turn.index, digest, answer)
        arms: dict[bool, tuple[Answer, str]] = {}
        for enabled in (False, True) if off_first else (True, False):
            arms[enabled] = await self._send(turn, request, enabled)
        (answer, digest), (baseline, other) = arms[True], arms[False]
        if digest != other:
            raise ReplayError("the requests of the two arms differ in more than speculation")
        return TurnResult(turn.trace.id, turn.index, digest, answer, baseline)

    async def _send(self, turn: Turn, request: bytes, enabled: bool) -> tuple[Answer, str]:
        """The answer, and the digest of what was really sent beside the speculation object."""
        body = with_speculation(request, enabled)
        answer = await self._client.complete(body, {TRAJECTORY_HEADER: trajectory_id(self._nonce, turn.trace.id)})
        if answer.completion_tokens < 1:
            raise ReplayError("the server reports no usage, so nothing can be measured")
        return answer, digest_without_speculation(body)


def base_url(url: str) -> str:
    """The server's root, whether or not `/v1` was given with it."""
    root = url.rstrip("/").removesuffix("/v1")
    if not re.match(r"https?://[^/]", root):
        raise ReplayError(f"--url must start with http:// or https://, got {url!r:.200}")
    try:
        httpx.URL(root)
    except httpx.InvalidURL as error:
        raise ReplayError(f"--url is no URL: {error}, got {url!r:.200}") from error
    return root


def request_of(turn: Turn, model: str, options: ReplayOptions) -> bytes:
    """The request of a turn but for its speculation object; ASCII, so that bytes are characters."""
    content: dict[str, Any] = {"model": model, "messages": [sent_message(message) for message in turn.prompt]}
    if turn.trace.tools:
        content["tools"] = list(turn.trace.tools)
    content |= {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.sampling_seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(content, separators=(",", ":")).encode()


def sent_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A recorded message as an agent would send it back: without its reasoning."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def with_speculation(request: bytes, enabled: bool) -> bytes:
    """The request with the speculation object as its last field; nothing else changes by a byte."""
    speculation = json.dumps({"enabled": enabled, "report": True}, separators=(",", ":")).encode()
    return request.removesuffix(b"}") + b',"speculation":' + speculation + b"}"


def digest_without_speculation(body: bytes) -> str:
    """Hex SHA-256 of a sent body up to its speculation object."""
    return hashlib.sha256(body[: body.rindex(b',"speculation":')]).hexdigest()


def trajectory_id(nonce: str, identifier: str) -> str:
    """The run's own name for a trajectory: printable ASCII of bounded length, distinct for distinct ids."""
    if len(identifier) <= ID_LENGTH and identifier.isascii() and identifier.isprintable():
        return f"{nonce}/{identifier}"
    return f"{nonce}/{hashlib.sha256(identifier.encode('utf-8', 'surrogatepass')).hexdigest()}"
