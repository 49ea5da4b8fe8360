"""Token ids of texts and of chats, and texts of token ids: for clients that count or keep tokens between turns."""

from typing import Any

from pydantic import Field

from agentspec.errors import InvalidRequest
from agentspec.server.convert import fold_system, plain_messages, plain_tools
from agentspec.server.wire import ChatRequest, TextRequest, Wire, parse_request
from agentspec.types import Worker


class Tokens(Wire):
    """The body of `POST /detokenize`."""

    tokens: list[int] = Field(max_length=1_000_000)
    model: str | None = None


def tokenized(body: dict[str, Any], worker: Worker) -> dict[str, Any]:
    """The token ids that a request with this `prompt`, or with these `messages` and `tools`, would begin with."""
    tokens = ids_of_chat(body, worker) if "messages" in body else ids_of_text(body, worker)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": worker.window}


def ids_of_chat(body: dict[str, Any], worker: Worker) -> tuple[int, ...]:
    """Those of the prompt that the chat template makes, the beginning of the answer's turn included."""
    asked = parse_request(ChatRequest, body)
    return worker.render(fold_system(plain_messages(asked.messages)), plain_tools(asked))


def ids_of_text(body: dict[str, Any], worker: Worker) -> tuple[int, ...]:
    """Those of one string."""
    asked = parse_request(TextRequest, body)
    if len(asked.prompt) != 1 or not isinstance(asked.prompt[0], str):
        raise InvalidRequest("prompt: must be one string", param="prompt")
    return worker.tokenize(asked.prompt[0], special=asked.add_special_tokens)


def detokenized(body: dict[str, Any], worker: Worker) -> dict[str, Any]:
    """The text that token ids spell, control tokens by their names; bytes that are no text become U+FFFD."""
    tokens = parse_request(Tokens, body).tokens
    for at, token in enumerate(tokens):
        if not 0 <= token < worker.vocabulary:
            raise InvalidRequest(
                f"tokens[{at}]: the model's tokens are 0 to {worker.vocabulary - 1}, got {token!s:.40}",
                param=f"tokens[{at}]",
            )
    return {"prompt": b"".join(map(worker.token_bytes, tokens)).decode(errors="replace")}
