"""Tool calls under a grammar: enforced, named, strict, or beside an answer of a format."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from agentspec.server.constrain import grammar_of
from agentspec.server.tools import ToolParser
from agentspec.server.wire import ChatRequest, parse_request
from agentspec.types import FinishReason, Grammar, SamplingParams
from tests.engine.constrained import GREEDY, SAMPLED, SAMPLINGS, Bench


@pytest.fixture(scope="module")
def bench(harness: Any, kit: Any, tiny_model: Path) -> Bench:
    return Bench(harness, kit, tiny_model)


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {"colour": {"$ref": "#/$defs/colour"}, "coats": {"type": "integer", "maximum": 9}},
                "required": ["colour"],
                "additionalProperties": False,
                "$defs": {"colour": {"enum": ["red", "<|end|>"]}},
            },
        },
    },
    {"type": "function", "function": {"name": 'say "hi"'}},
]


def tool_grammar(**fields: Any) -> Grammar:
    asked = parse_request(ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields})
    grammar = grammar_of(asked)
    assert grammar is not None
    return grammar


def pieces_of(text: str) -> list[Any]:
    parser = ToolParser()
    return [*parser.feed(text), *parser.finish()]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("seed", range(3))
def test_an_enforced_call_is_a_call_that_follows_its_schema(bench: Bench, sampling: SamplingParams, seed: int) -> None:
    grammar = tool_grammar(tool_choice="required", parallel_tool_calls=False)
    made = bench.agreed(grammar, sampling, count=250, seed=seed)
    assert made.finish is FinishReason.STOP
    (call,) = pieces_of(made.text)
    arguments = json.loads(call.arguments)
    if call.name == "paint":
        jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
    else:
        assert (call.name, arguments) == ('say "hi"', {})


def test_a_named_function_is_the_one_that_is_called(bench: Bench) -> None:
    grammar = tool_grammar(tool_choice={"type": "function", "function": {"name": "paint"}})
    made = bench.agreed(grammar, GREEDY, count=250)
    (call,) = pieces_of(made.text)
    assert call.name == "paint"


def test_several_calls_may_follow_one_another(bench: Bench) -> None:
    comes_back = bench.eager(**{"\n": 30.0, "s": 9.0})
    made = bench.agreed(tool_grammar(tool_choice="required"), comes_back, count=330)
    assert [piece.name for piece in pieces_of(made.text)[:2]] == ['say "hi"'] * 2


def test_calls_in_free_text_follow_strict_schemas(bench: Bench) -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    grammar = tool_grammar(tools=[strict], tool_choice="auto")
    free = bench.agreed(grammar, SAMPLED, count=30)
    assert free.text and pieces_of(free.text) == [free.text]
    probe = bench.start_of(grammar)
    good = 'Well. <tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
    assert probe.validate_tokens(bench.tokens(good + " and <b>")) == len(good) + 8
    bad = good.replace('"red"', '"tan"')
    assert probe.validate_tokens(bench.tokens(bad)) == bad.index('tan"')


def test_an_answer_in_a_format_or_a_call(bench: Bench) -> None:
    grammar = tool_grammar(response_format={"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}})
    probe = bench.start_of(grammar)
    call = '<tool_call>\n{"name": "paint", "arguments": {"any": 1}}\n</tool_call>'
    for text, legal in (('"yes"', 5), (call, len(call)), ("no", 0)):
        assert probe.validate_tokens(bench.tokens(text)) == legal
