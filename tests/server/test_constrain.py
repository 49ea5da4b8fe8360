"""What a request holds its answer to: the grammar that the worker gets, and what is refused before it is asked."""

import json
from typing import Any

import pytest

from agentspec.errors import InvalidRequest
from agentspec.types import Grammar, GrammarKind
from tests.server.conftest import ScriptedWorker, ask, error_of, post

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def grammar_for(**fields: Any) -> Grammar | None:
    """The grammar that the worker is asked for."""
    worker = ScriptedWorker()
    response = post(worker, ask(**fields))
    assert response.status_code == 200, response.text
    return worker.requests[0].grammar


def schema_for(**fields: Any) -> Any:
    grammar = grammar_for(**fields)
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    schema = json.loads(grammar.text)
    assert list(schema.pop("x-guidance")) == ["whitespace_pattern"]
    return schema


def refusal(**fields: Any) -> dict[str, Any]:
    worker = ScriptedWorker()
    response = post(worker, ask(**fields))
    assert response.status_code == 400, response.text
    assert worker.requests == []
    return error_of(response)


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": FORMAT}, SCHEMA),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None, "disable_any_whitespace": False}}, SCHEMA),
    ],
)
def test_a_schema_reaches_the_worker_as_it_is(fields: dict[str, Any], schema: Any) -> None:
    assert schema_for(**fields) == schema


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+", "guided_regex")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+", "structured_outputs.regex")),
        (
            {"guided_grammar": 'root ::= "a"'},
            Grammar(GrammarKind.CONTEXT_FREE, 'root ::= "a"', "guided_grammar"),
        ),
        (
            {"guided_choice": ["ja", 'n"ein']},
            Grammar(GrammarKind.CONTEXT_FREE, 'start: "ja" | "n\\"ein"', "guided_choice"),
        ),
    ],
)
def test_regexes_choices_and_grammars_reach_the_worker(fields: dict[str, Any], expected: Grammar) -> None:
    assert grammar_for(**fields) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None, "structured_outputs": {}},
        {"tools": [tool(strict=False)], "tool_choice": "auto"},
        {"tools": [tool(strict=True)], "tool_choice": "none"},
    ],
)
def test_a_free_answer_has_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_for(**fields) is None


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ([1], "must be an object"),
        (True, "must be an object"),
        ("{", "is not JSON"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"anyOf": [{"items": [{}]}]}, "prefixItems"),
        ({"$defs": {"d": {"additionalItems": False}}}, "additionalItems"),
        ({"properties": {"a": {"type": "object", "minProperties": 2}}}, "minProperties"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "1000 properties"),
    ],
)
def test_what_the_library_would_pass_over_is_refused_by_name(schema: Any, word: str) -> None:
    error = refusal(guided_json=schema)
    assert word in error["message"]
    assert error["param"] == "guided_json"


def test_names_of_properties_are_not_keywords() -> None:
    schema = {"type": "object", "properties": {"x-guidance": {}, "minProperties": {}, "items": {}}, "minProperties": 1}
    assert schema_for(guided_json=schema) == schema
    assert schema_for(guided_json={"enum": [{"x-guidance": 1}]}) == {"enum": [{"x-guidance": 1}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"schema": {}}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "tools": [tool()], "tool_choice": "required"}, "guided_regex"),
        ({"tools": [tool(parameters={"type": "array"})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool(parameters={"x-guidance": {}}, strict=True)]}, "tools"),
    ],
)
def test_malformed_and_contradicting_options_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields)["param"] == param


def test_an_enforced_call_overrides_the_format_of_text() -> None:
    grammar = grammar_for(tools=[tool()], tool_choice="required", response_format=FORMAT)
    assert grammar is not None and grammar.param == "tools" and "answer" not in grammar.text


@pytest.mark.parametrize(("strict", "followed"), [(None, True), (True, True), (False, False)])
def test_an_enforced_call_follows_its_schema_unless_it_is_said_not_to_be_strict(
    strict: bool | None, followed: bool
) -> None:
    grammar = grammar_for(tools=[tool(parameters=SCHEMA, strict=strict)], tool_choice="required")
    assert grammar is not None and ('"integer"' in grammar.text) == followed


def test_what_the_worker_refuses_is_a_400_in_both_ways_of_answering() -> None:
    for stream in (False, True):
        worker = ScriptedWorker(failure=InvalidRequest("guided_regex: unclosed group", param="guided_regex"))
        response = post(worker, ask(guided_regex="(", stream=stream))
        assert response.status_code == 400
        assert error_of(response)["param"] == "guided_regex"
