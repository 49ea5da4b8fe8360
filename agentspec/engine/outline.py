"""Scaffolds of requests: example calls of their tools through the model's template, as documents with gaps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.gaps import GAP
from agentspec.cache.scaffold import LEAD
from agentspec.engine.chat import Chat
from agentspec.engine.control import new_mark
from agentspec.engine.examples import NUMBER, TEXT, examples
from agentspec.errors import InvalidRequest
from agentspec.types import Outline

FILLINGS = (("report", "7"), ("#W24", "3.5"), ("Go.", "-1"))
"""Texts and numbers that stand in blanks while tokens are made: what they begin and end with decides which tokens the
text around a value falls into."""

ASKED: Sequence[Mapping[str, Any]] = ({"role": "user", "content": "?"},)
INDENTS = (None, 2, 4)
"""How answers of a schema are laid out."""

MAX_TEXT = 50_000
"""Characters of an example; tools whose examples are longer are passed over."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def documents(chat: Chat, outline: Outline, most: int) -> list[Int32s]:
    """Token documents of what is fixed of an answer, `GAP` where a value stands, with `most` tokens together.

    The first example of each tool comes before the second one of any.
    """
    lead = chat.render(ASKED, None)[-LEAD:]
    ways = [calls(chat, tool) for tool in outline.tools]
    if outline.schema is not None:
        ways.append(answers(chat, outline.schema))
    found: dict[bytes, Int32s] = {}
    for example in chain.from_iterable(zip_longest(*ways)):
        for document in example or ():
            whole = np.array((*lead, *document), np.int32)
            if whole.size > most:
                return list(found.values())
            if found.setdefault(whole.tobytes(), whole) is whole:
                most -= whole.size
    return list(found.values())


def calls(chat: Chat, tool: Mapping[str, Any]) -> Iterator[list[list[int]]]:
    """Documents of one example call of a tool after the other."""
    function = tool.get("function") or {}
    name = function.get("name")
    shown = {"type": "function", "function": {"name": name, "description": "", "parameters": NO_PARAMETERS}}
    for arguments in examples(function.get("parameters") or NO_PARAMETERS):
        mark = new_mark()
        call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = chat.reply(ASKED, message, [shown], mark)
        except InvalidRequest:
            return
        if len(text) > MAX_TEXT:
            return
        yield [gapped(chat, text, mark, *filling) for filling in FILLINGS]


def answers(chat: Chat, schema: Any) -> Iterator[list[list[int]]]:
    """Documents of one example answer of a schema after the other, laid out in several ways."""
    for value in examples(schema):
        if not value:
            return
        mark = new_mark()
        texts = [json.dumps(chat.control.cut(value, mark), ensure_ascii=False, indent=indent) for indent in INDENTS]
        if max(map(len, texts)) > MAX_TEXT:
            return
        yield [
            gapped(chat, text, mark, *filling) + sorted(chat.end_tokens())[:1] for text in texts for filling in FILLINGS
        ]


def gapped(chat: Chat, text: str, mark: str, said: str, number: str) -> list[int]:
    """Token ids of an answer to the end of its turn, with its blanks filled, and `GAP` for tokens in which a filling
    has a part."""
    ends, found = chat.end_tokens(), list[int]()
    for piece in text.split(mark):
        filled, blank = with_fillings(piece, {TEXT: said, str(NUMBER): number})
        encoded = chat.tokenizer(filled, add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if any(blank[start:stop]):
                token = GAP
            if token != GAP or found[-1:] != [GAP]:
                found.append(token)
            if token in ends:
                return found
    return found


def with_fillings(text: str, fillings: Mapping[str, str]) -> tuple[str, list[bool]]:
    """A text with its blanks filled, and which of its characters are of a filling."""
    filled, inside = text, [False] * len(text)
    for blank, filling in fillings.items():
        parts = filled.split(blank)
        at, made = 0, list[bool]()
        for number, part in enumerate(parts):
            made += inside[at : at + len(part)]
            at += len(part) + len(blank)
            made += [True] * len(filling) if number < len(parts) - 1 else []
        filled, inside = filling.join(parts), made
    return filled, inside
