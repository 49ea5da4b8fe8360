"""Scaffolds: what the tools of a request fix of its answer, as tokens of real answers with gaps for values."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.draft import draft
from agentspec.cache.gaps import GAP
from agentspec.cache.scaffold import ScaffoldGuide, indexed
from agentspec.engine.chat import Chat
from agentspec.engine.examples import MAX_ENTRIES, NUMBER, TEXT, examples
from agentspec.engine.outline import ASKED, documents, with_fillings
from agentspec.traces.simulate import accepted
from agentspec.types import Origin, Outline

TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "nights": {"type": "integer"},
        "class": {"type": "string", "enum": ["first", "second"]},
        "meals": {"type": "boolean"},
        "guests": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
    "required": ["city", "nights"],
}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


BOOK, PING = tool("book_trip", TRIP), tool("ping", None)


@pytest.fixture(scope="module")
def chat(tiny_model: Path) -> Chat:
    return Chat.load(tiny_model)


def call(chat: Chat, name: str, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """A call as the template writes it."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
    return chat.answer(ASKED, message, None)


def drafted(chat: Chat, tools: Sequence[Mapping[str, Any]], said: Sequence[int], budget: int = 64) -> list[str]:
    """The texts of all paths that a scaffold alone proposes after the beginning of an answer."""
    index = indexed(documents(chat, Outline(tuple(tools)), 10**6))
    prompt = chat.render(ASKED, None)
    guide = ScaffoldGuide(lambda: index, prompt)
    guide.observe(np.array(said, np.int32))
    offer = guide.offer()
    assert offer is not None
    tree = draft([offer], np.array([*prompt, *said], np.int32), budget)
    texts = [""]
    for node in range(1, len(tree)):
        assert tree.origin[node] == Origin.SCAFFOLD and tree.token[node] != GAP
        texts.append(texts[tree.parent[node]] + chat.tokenizer.decode([tree.token[node]]))
    return texts


def after(chat: Chat, whole: Sequence[int], text: str) -> list[int]:
    """The beginning of an answer, to the first occurrence of a text in it."""
    return next(list(whole[:size]) for size in range(len(whole)) if chat.tokenizer.decode(whole[:size]).endswith(text))


def steps(chat: Chat, tools: Sequence[Mapping[str, Any]], answer: Sequence[int]) -> int:
    """Steps of 32 nodes in which an answer is written with a scaffold alone."""
    index = indexed(documents(chat, Outline(tuple(tools)), 10**6))
    context, rest, count = list(chat.render(ASKED, None)), list(answer), 0
    guide = ScaffoldGuide(lambda: index, context)
    while rest:
        offer = guide.offer()
        assert offer is not None
        tree = draft([offer], np.array(context, np.int32), 32)
        done = min(1 + len(accepted((tree.token, tree.parent), rest)), len(rest))
        guide.observe(np.array(rest[:done], np.int32))
        context, rest, count = context + rest[:done], rest[done:], count + 1
    return count


def test_a_call_is_drafted_before_anything_is_known(chat: Chat) -> None:
    ping = call(chat, "ping", {})
    assert len(ping) == 59 and steps(chat, [PING], ping) <= 7
    assert steps(chat, [PING, BOOK], ping) <= 9
    booked = call(chat, "book_trip", {"city": "Ulm", "nights": 2, "class": "second", "guests": [{"name": "Ada"}]})
    values = len('Ulm"2,Ada"')
    assert len(booked) > 120 and steps(chat, [PING, BOOK], booked) < values + 20


def test_a_value_of_any_length_is_passed_over_and_the_next_key_drafted(chat: Chat) -> None:
    whole = call(
        chat, "book_trip", {"city": "a long, long name: with 'quotes' and ünicode", "nights": 12, "class": "first"}
    )
    texts = drafted(chat, [BOOK], after(chat, whole, 'ünicode"'))
    assert max(texts, key=len).startswith(', "nights": ')
    texts = drafted(chat, [BOOK], after(chat, whole, "12,"))
    assert ' "class": "first' in texts and ' "class": "second' in texts


def test_values_that_the_schema_names_are_drafted(chat: Chat) -> None:
    schema = {"type": "object", "properties": {"unit": {"const": "kelvin"}, "on": {"type": "boolean"}}}
    whole = call(chat, "set", {"unit": "kelvin", "on": True})
    texts = drafted(chat, [tool("set", schema)], after(chat, whole, '{"unit": "'))
    assert any(text.startswith('kelvin", "on": ') for text in texts)
    texts = drafted(chat, [tool("set", schema)], after(chat, whole, '"on": '))
    assert any(text.startswith("true}") for text in texts) and any(text.startswith("false}") for text in texts)


def test_an_answer_of_a_schema_is_drafted_compact_and_indented(chat: Chat) -> None:
    made = documents(chat, Outline(schema=TRIP), 10**6)
    texts = ["".join("_" if token == GAP else chat.tokenizer.decode([token]) for token in one) for one in made]
    assert any('{"city": "_", "nights": _}<|end|>' in text for text in texts)
    assert any('{\n  "city": "_",\n  "nights": _\n}<|end|>' in text for text in texts)
    assert documents(chat, Outline(schema={"type": "object"}), 10**6) == []


def test_documents_have_the_tokens_of_real_answers(chat: Chat) -> None:
    """With a value in its gaps a document is an answer, token for token."""
    real = call(chat, "book_trip", {"city": "report", "nights": 7})
    lead = chat.render(ASKED, None)[-3:]
    spelled = [chat.tokenizer.encode("report"), chat.tokenizer.encode("7")]
    found = []
    for document in documents(chat, Outline((BOOK,)), 10**6):
        values, tokens = iter(spelled), list[int]()
        for token in document.tolist():
            tokens += next(values, [GAP]) if token == GAP else [token]
        found.append(tuple(tokens))
    assert (*lead, *real) in found


def test_every_tool_has_a_document_before_any_has_two(chat: Chat) -> None:
    tools = tuple(tool(f"tool_{number}", TRIP) for number in range(20))
    first = documents(chat, Outline(tools), 10**6)
    limit = sum(one.size for one in first[:60])
    made = documents(chat, Outline(tools), limit)
    assert sum(one.size for one in made) <= limit
    texts = ["".join(chat.tokenizer.decode([token]) for token in one if token != GAP) for one in made]
    assert all(any(f'"tool_{number}"' in text for text in texts) for number in range(20))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
keywords = ("type", "properties", "required", "enum", "const", "items", "$ref", "anyOf", "allOf", "oneOf", "$defs")
schemas = st.recursive(
    json_values | st.sampled_from(["object", "array", "string", "number", "#", "#/$defs/a"]),
    lambda inner: st.dictionaries(st.sampled_from([*keywords, "a", "ключ"]), inner | st.lists(inner, max_size=3)),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(schemas)
def test_any_schema_gives_examples_that_are_json(schema: Any) -> None:
    for example in examples(schema):
        assert len(json.dumps(example)) < 100_000


@settings(deadline=None, max_examples=20)
@given(schemas)
def test_no_schema_fails_a_scaffold(chat: Chat, schema: Any) -> None:
    for document in documents(chat, Outline((tool("имя", schema), PING), schema), 4000):
        assert document.size and document.min() >= 0


def test_a_tool_that_is_too_long_leaves_the_others_alone(chat: Chat) -> None:
    made = documents(chat, Outline((tool("x" * 100_000, TRIP), tool("y", {"const": "z" * 100_000}), PING)), 8000)
    assert {one.size for one in made} == {62}


def test_references_in_a_circle_and_huge_schemas_end() -> None:
    circle = {"properties": {"next": {"$ref": "#"}, "name": {"type": "string"}}, "required": ["next"]}
    assert all(isinstance(example, dict) for example in examples(circle))
    wide = {"properties": {f"key{number}": {"type": "string"} for number in range(10_000)}}
    assert {len(example) for example in examples(wide)} == {MAX_ENTRIES, 0}
    many = {"properties": {"kind": {"enum": [f"value {number}" for number in range(10_000)]}}}
    assert next(examples(many)) == {"kind": "value 0"}
    assert len(list(examples(many))) == 16
    mutual = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    assert set(examples(mutual)) == {TEXT}


def test_examples_leave_out_what_may_be_left_out() -> None:
    made = list(examples(TRIP))
    assert list(made[0]) == ["city", "nights", "class", "meals", "guests"]
    assert made[1] == {"city": TEXT, "nights": NUMBER}
    assert [list(one)[2:] for one in made[3::2]] == [["class", "meals"], ["class"]]
    assert [one["meals"] for one in made[::2]] == [True, False, True]
    assert {one["class"] for one in made if "class" in one} == {"first", "second"}
    assert made[0]["guests"] == [{"name": TEXT}]


@given(st.lists(st.sampled_from(["a", "<T>", "<N>", "bc"]), max_size=8))
def test_fillings_are_where_the_blanks_were(parts: list[str]) -> None:
    filled, inside = with_fillings("".join(parts), {"<T>": "TTT", "<N>": "NN"})
    said = {"<T>": "TTT", "<N>": "NN"}
    assert filled == "".join(said.get(part, part) for part in parts)
    assert inside == [part in said for part in parts for _ in said.get(part, part)]
