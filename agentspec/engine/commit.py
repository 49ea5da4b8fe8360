"""The only place where a sequence grows: token by token, so that every end is found where plain decoding finds it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from agentspec.engine.text import TextStream
from agentspec.types import FinishReason


@dataclass(slots=True)
class Completion:
    """What a request has produced so far."""

    text: TextStream
    max_tokens: int
    end_tokens: Collection[int]
    """Tokens that end the turn (EOS, end of turn); they count as tokens and give no text."""

    complete_at: int | None = None
    """Number of tokens after which the request's grammar lets nothing follow."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.max_tokens - len(self.tokens)


def commit(completion: Completion, tokens: Sequence[int]) -> tuple[int, str]:
    """Append a verified run; returns how many of its tokens were kept and the text that became final.

    At each token the checks are, in order: stop string, end token, grammar, length. Whatever follows an end is
    dropped.
    """
    text = ""
    for kept, token in enumerate(tokens, start=1):
        completion.tokens.append(token)
        ends = token in completion.end_tokens
        text += "" if ends else completion.text.push(token)
        if completion.text.stopped or ends or len(completion.tokens) == completion.complete_at:
            completion.finish = FinishReason.STOP
        elif completion.room <= 0:
            completion.finish = FinishReason.LENGTH
        if completion.finish:
            return kept, text + completion.text.finish()
    return len(tokens), text
