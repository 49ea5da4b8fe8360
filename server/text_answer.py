"""Answers of `/v1/completions`: plain text, the prompt in front of it where that is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.server.answer import LEAST, Answer, Frame
from agentspec.server.text_logprobs import Entry, Speller, prompt_entries, text_logprobs
from agentspec.server.wire import TextRequest
from agentspec.types import Delta, FinishReason, TokenLogprob


@dataclass(slots=True)
class Prompt:
    """A prompt as it is shown again."""

    text: bytes
    """What was sent, or what the tokens that were sent spell, control tokens by their names."""

    tokens: tuple[int, ...]
    logprobs: list[TokenLogprob]
    """Those known so far, of all tokens but the first; one list for all prompts with the same tokens."""

    def __str__(self) -> str:
        return self.text.decode("utf-8", "replace")


@dataclass(slots=True)
class TextChoice:
    """What was read of one choice so far."""

    prompt: Prompt
    speller: Speller
    pieces: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    finish: FinishReason | None = None
    begun: bool = False
    """Whether the prompt was shown, or a token came."""


class TextAnswer(Answer):
    """The answer to a text completion request."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, frame: Frame, asked: TextRequest, prompts: Sequence[tuple[int, ...]], speller: Speller) -> None:
        super().__init__(frame)
        self._asked = asked
        self._speller = speller
        self._choices: list[TextChoice] = []
        logprobs: dict[tuple[int, ...], list[TokenLogprob]] = {}
        for given, tokens in zip(asked.prompt, prompts, strict=True):
            text = given.encode() if isinstance(given, str) else b"".join(map(speller.token_bytes, tokens))
            prompt = Prompt(text, tokens, logprobs.setdefault(tokens, []))
            start = len(str(prompt)) if asked.echo else 0
            self._choices += [TextChoice(prompt, speller.at(start)) for _ in range(frame.n)]

    def opening(self) -> list[dict[str, Any]]:
        return []

    def _contents(self, delta: Delta) -> list[dict[str, Any]]:
        parts = self._read(delta)
        return [self._piece(delta.index, text, entries) for text, entries in parts if text or entries]

    def _ending(self, delta: Delta, finish: FinishReason) -> dict[str, Any]:
        return self._piece(delta.index, "", (), finish)

    def _gather(self, delta: Delta) -> None:
        choice = self._choices[delta.index]
        for text, entries in self._read(delta):
            choice.pieces.append(text)
            choice.entries += entries
        choice.finish = delta.finish

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        found: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.pieces),
            "logprobs": None if self._asked.logprobs is None else text_logprobs(choice.entries),
            "finish_reason": choice.finish,
        }
        if self._asked.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._prompt_logprobs(choice.prompt, self._asked.prompt_logprobs)
        return found

    def _read(self, delta: Delta) -> list[tuple[str, Sequence[Entry]]]:
        """Text and its tokens: the prompt's, where it is to be shown, before the first of the completion's."""
        choice = self._choices[delta.index]
        choice.prompt.logprobs += delta.prompt_logprobs
        if not delta.tokens and delta.finish is None:
            return []
        top = self._asked.logprobs
        parts: list[tuple[str, Sequence[Entry]]] = []
        if self._asked.echo and not choice.begun:
            prompt = choice.prompt
            shown = (
                [] if top is None else prompt_entries(self._speller, prompt.text, prompt.tokens, prompt.logprobs, top)
            )
            parts.append((str(prompt), shown))
        choice.begun = True
        parts.append((delta.text, [] if top is None else [choice.speller.entry(one, top) for one in delta.logprobs]))
        return parts

    def _piece(
        self, index: int, text: str, entries: Sequence[Entry], finish: FinishReason | None = None
    ) -> dict[str, Any]:
        return self._chunk(index, finish, text=text, logprobs=text_logprobs(entries) if entries else None)

    def _prompt_logprobs(self, prompt: Prompt, top: int) -> list[dict[str, Any] | None]:
        """vLLM's form: for every token but the first, it and the `top` likeliest by id."""
        found: list[dict[str, Any] | None] = [None]
        for one in prompt.logprobs:
            ranked = [(one.token, one.logprob, one.rank)]
            ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top[:top], start=1)]
            entries: dict[str, Any] = {}
            for token, logprob, rank in ranked:
                spelled = self._speller.spelled(token)
                figures = {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": spelled}
                entries.setdefault(str(token), figures)
            found.append(entries)
        return found
