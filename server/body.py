"""Request bodies: read under a limit, parsed to JSON that can be walked and encoded again without surprises."""

import asyncio
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

from starlette.requests import Request

from agentspec.errors import BodyTooLarge, InvalidRequest, RequestTimeout

MAX_DEPTH = 100
"""Deepest nesting of arrays and objects; deeper bodies are refused."""


async def read_body(request: Request, limit: int, seconds: float = 0) -> bytes:
    """The whole body; raises `BodyTooLarge` when it has more than `limit` bytes, announced or not, and
    `RequestTimeout` when it has not arrived after `seconds`; 0 waits forever."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest(f"a body with content-encoding {encoding!r} is not supported", param="content-encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds or None):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise BodyTooLarge(f"the body is larger than {limit} bytes")
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {seconds:g} s") from None
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises `InvalidRequest` for everything else."""
    value = as_object(parse_json(body))
    if value is None:
        raise InvalidRequest("the body must be a JSON object")
    refuse_deep(value)
    return value


def as_object(value: Any) -> dict[str, Any] | None:
    """`value` if it is a JSON object."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def as_list(value: Any) -> Sequence[Any] | None:
    """`value` if it is a JSON array."""
    return cast(Sequence[Any], value) if isinstance(value, list) else None


def parse_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8-sig"), parse_constant=refuse_constant, parse_float=finite)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise too_deep() from None
    except ValueError:
        raise InvalidRequest("the body holds a number with too many digits") from None


def refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body is not JSON: {name} is not a JSON value")


def finite(digits: str) -> float:
    """A number; raises `InvalidRequest` for one that is too large to be told from infinity."""
    value = float(digits)
    if math.isinf(value):
        raise InvalidRequest(f"the body holds the number {digits:.40}, which is too large")
    return value


def refuse_deep(value: Any) -> None:
    """Raises `InvalidRequest` when `value` nests too deep or holds text that UTF-8 cannot encode."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in children(parent)]
        if not level:
            return
    raise too_deep()


def children(value: Any) -> Iterable[Any]:
    if isinstance(value, str) and not encodable(value):
        raise InvalidRequest("the body holds half of a surrogate pair, which is not a character")
    fields = as_object(value)
    if fields is not None:
        return [*fields, *fields.values()]
    return as_list(value) or ()


def encodable(text: str) -> bool:
    """Whether `text` is free of lone surrogates."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body nests deeper than {MAX_DEPTH} levels")
