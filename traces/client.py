"""Asks an OpenAI-compatible server for one streamed completion and insists on a whole answer."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentspec.errors import ReplayError
from agentspec.traces.sse import EventReader

CONTEXT_FULL = ("context_length_exceeded", "maximum context length")
"""Code, or words in the message, by which servers say that a prompt does not fit."""


class PromptTooLong(ReplayError):
    """The server says that the prompt does not fit its model."""


@dataclass(slots=True)
class Answer:
    """One completion as it arrived."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Fragments of tool calls, in order."""

    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    report: Mapping[str, Any] | None = None
    """The server's `agentspec` object; None from servers that know nothing of it."""

    first_s: float = 0.0
    """Seconds from sending the request to the first text or call, by the client's clock."""

    last_s: float = 0.0
    """The same to the last text or call."""


class ChatClient:
    """A connection to one server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def model(self) -> str:
        """Name of the first model that the server lists."""
        response = await self._get("/v1/models")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ReplayError(f"{self._http.base_url}: lists no model; name one with --model") from error

    async def complete(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """The answer to a streaming chat request.

        Raises `PromptTooLong`, or `ReplayError` for every other answer than one with a finish reason and `[DONE]`.
        """
        answer = Answer()
        reader = EventReader()
        started = time.perf_counter()
        done = False
        try:
            all_headers = {**headers, "content-type": "application/json"}
            async with self._http.stream("POST", "/v1/chat/completions", content=body, headers=all_headers) as response:
                await check_response(response)
                async for chunk in response.aiter_bytes():
                    for data in reader.feed(chunk):
                        done = take_event(answer, data, time.perf_counter() - started) or done
                for data in reader.close():
                    done = take_event(answer, data, time.perf_counter() - started) or done
        except httpx.HTTPError as error:
            raise ReplayError(f"the connection failed before the answer was complete: {words(error)}") from error
        if answer.finish is None or not done:
            missing = "[DONE]" if answer.finish else "a finish reason"
            raise ReplayError(f"the stream ended without {missing}; the answer is not complete")
        return answer

    async def _get(self, path: str) -> httpx.Response:
        try:
            response = await self._http.get(path)
        except httpx.HTTPError as error:
            raise ReplayError(f"{self._http.base_url}: cannot be reached: {words(error)}") from error
        if response.status_code != 200:
            raise ReplayError(f"{self._http.base_url}: GET {path} gave status {response.status_code}")
        return response


def words(error: Exception) -> str:
    """What an exception says, or at least its name."""
    return str(error) or type(error).__name__


async def check_response(response: httpx.Response) -> None:
    """Raises unless the response is a stream of events."""
    if response.status_code != 200:
        raise refused(response.status_code, await response.aread())
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise ReplayError(f"the server did not stream: content type {kind!r:.80}")


def refused(status: int, body: bytes) -> ReplayError:
    """The error of an answer that is not 200."""
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    text = str(message) if message else body[:200].decode(errors="replace")
    if status == 400 and (code == CONTEXT_FULL[0] or CONTEXT_FULL[1] in text):
        return PromptTooLong(text)
    return ReplayError(f"the server answered with status {status}: {text}")


def take_event(answer: Answer, data: str, elapsed_s: float) -> bool:
    """Adds one event to the answer; True for the closing `[DONE]`."""
    if data.strip() == "[DONE]":
        return True
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise ReplayError(f"the stream has an event that is not JSON: {data!r:.200}") from error
    if not isinstance(chunk, dict):
        raise ReplayError(f"the stream has an event that is not an object: {data!r:.200}")
    failure = chunk.get("error")
    if failure is not None:
        reason = failure.get("message", failure) if isinstance(failure, dict) else failure
        raise ReplayError(f"the server failed: {reason}")
    try:
        take_chunk(answer, chunk, elapsed_s)
    except (AttributeError, TypeError, ValueError) as error:
        raise ReplayError(f"the stream has an event of an unknown form: {data!r:.200}") from error
    return False


def take_chunk(answer: Answer, chunk: Mapping[str, Any], elapsed_s: float) -> None:
    """Adds text, calls, finish reason, usage and report of a chunk, whichever it has."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        calls = delta.get("tool_calls") or []
        if text or calls:
            answer.text += text
            answer.calls += calls
            answer.first_s = answer.first_s or elapsed_s
            answer.last_s = elapsed_s
        answer.finish = choice.get("finish_reason") or answer.finish
    usage = chunk.get("usage")
    if usage:
        answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        answer.completion_tokens = int(usage.get("completion_tokens") or 0)
        answer.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    report = chunk.get("agentspec")
    if report is not None and not isinstance(report, dict):
        raise TypeError("agentspec must be an object")
    answer.report = report or answer.report
