"""Answers of `/v1/chat/completions`: messages with text and tool calls."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from agentspec.server.answer import LEAST, Answer, Frame
from agentspec.server.tools import Call, ToolParser
from agentspec.types import Delta, FinishReason, TokenLogprob


class ChatChoice:
    """What was read of one choice so far."""

    def __init__(self, with_tools: bool) -> None:
        self._parser = ToolParser() if with_tools else None
        self.pieces: list[str | Call] = []
        self.logprobs: list[TokenLogprob] = []
        self.calls = 0
        self.finish: FinishReason | None = None

    def read(self, delta: Delta) -> Sequence[str | Call]:
        """The pieces that became certain; empty text is left out."""
        if self._parser is None:
            found: Sequence[str | Call] = [delta.text] if delta.text else []
        else:
            found = self._parser.feed(delta.text)
            found = found + self._parser.finish() if delta.finish else found
        self.calls += sum(isinstance(piece, Call) for piece in found)
        return found


class ChatAnswer(Answer):
    """The answer to a chat request."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self, frame: Frame, with_tools: bool = False, token_bytes: Callable[[int], bytes] | None = None
    ) -> None:
        """`token_bytes` spells tokens where log-probabilities were asked for; None where they were not."""
        super().__init__(frame)
        self._token_bytes = token_bytes
        self._choices = [ChatChoice(with_tools) for _ in range(frame.choices)]

    def opening(self) -> list[dict[str, Any]]:
        return [self._piece(index, {"role": "assistant", "content": ""}) for index in range(self.frame.choices)]

    def _contents(self, delta: Delta) -> list[dict[str, Any]]:
        """Nothing while all of the text is held back."""
        choice = self._choices[delta.index]
        number = choice.calls
        chunks: list[dict[str, Any]] = []
        pieces = choice.read(delta)
        if delta.logprobs and not (pieces and isinstance(pieces[0], str)):
            chunks.append(self._piece(delta.index, {"content": ""}, delta.logprobs))
        for place, piece in enumerate(pieces):
            if isinstance(piece, str):
                chunks.append(self._piece(delta.index, {"content": piece}, () if place else delta.logprobs))
            else:
                chunks += [self._piece(delta.index, {"tool_calls": [part]}) for part in call_parts(number, piece)]
                number += 1
        return chunks

    def _ending(self, delta: Delta, finish: FinishReason) -> dict[str, Any]:
        return self._piece(delta.index, {}, finish=finish_reason(finish, self._choices[delta.index].calls))

    def _gather(self, delta: Delta) -> None:
        choice = self._choices[delta.index]
        choice.pieces += choice.read(delta)
        choice.logprobs += delta.logprobs
        choice.finish = delta.finish

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        assert choice.finish is not None
        text = "".join(piece for piece in choice.pieces if isinstance(piece, str))
        calls = [piece for piece in choice.pieces if isinstance(piece, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text.strip() else text}
        if calls:
            message["tool_calls"] = [opened(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": finish_reason(choice.finish, choice.calls),
        }

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        finish: FinishReason | None = None,
    ) -> dict[str, Any]:
        return self._chunk(index, finish, delta=delta, logprobs=self._logprobs(logprobs) if logprobs else None)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """One entry per token; None where they were not asked for."""
        if self._token_bytes is None:
            return None
        spell = self._token_bytes
        entries = []
        for one in logprobs:
            best = [entry(spell(token), logprob) for token, logprob in one.top]
            entries.append({**entry(spell(one.token), one.logprob), "top_logprobs": best})
        return {"content": entries, "refusal": None}


def entry(spelled: bytes, logprob: float) -> dict[str, Any]:
    """A token and its log-probability."""
    return {"token": spelled.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(spelled)}


def call_parts(number: int, call: Call) -> list[dict[str, Any]]:
    """The opening fragment with id and name, then the arguments."""
    return [
        {"index": number, **opened(Call(call.name, ""))},
        {"index": number, "function": {"arguments": call.arguments}},
    ]


def opened(call: Call) -> dict[str, Any]:
    """A call under a fresh id."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def finish_reason(finish: FinishReason, calls: int) -> FinishReason:
    """A model that stopped by itself after a call stopped for it."""
    return FinishReason.TOOL_CALLS if calls and finish is FinishReason.STOP else finish
