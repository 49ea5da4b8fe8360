"""Grammars that are wrong, huge or slow: refused by name in bounded time; and the compiler's own bounds."""

import asyncio
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from agentspec.engine.encoder import PlainEncoder
from agentspec.engine.grammar import Grammars
from agentspec.errors import AgentSpecError, InvalidRequest
from agentspec.types import FinishReason, Grammar, GrammarKind
from tests.engine.constrained import GREEDY, SAMPLED, Bench, lark_of, regex_of, schema_of


@pytest.fixture(scope="module")
def bench(harness: Any, kit: Any, tiny_model: Path) -> Bench:
    return Bench(harness, kit, tiny_model)


HOSTILE = {
    "deep": (schema_of(json.loads('{"items":' * 300 + "{}" + "}" * 300)), "recursion"),
    "remote": (schema_of({"$ref": "https://example.com/schema.json"}), "example.com"),
    "file": (schema_of({"$ref": "file:///etc/passwd"}), "passwd"),
    "nowhere": (schema_of({"$ref": "#/$defs/x"}), "$defs"),
    "itself": (schema_of({"$ref": "#"}), "matches no text"),
    "circle": (schema_of({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "matches no text"),
    "array": (schema_of([1, 2]), "response_format"),
    "text": (Grammar(GrammarKind.JSON_SCHEMA, "{", "guided_json"), "guided_json"),
    "unique": (schema_of({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "not": (schema_of({"not": {"type": "string"}}), "not"),
    "if": (schema_of({"if": {}, "then": {}}), "if"),
    "format": (schema_of({"type": "string", "format": "horoscope"}), "horoscope"),
    "empty": (schema_of({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
    "many": (
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"{i:0100}" for i in range(10_000)]}), "guided_json"),
        "characters",
    ),
    "regex": (regex_of("(a"), "unclosed"),
    "look": (regex_of("(?=a)b"), "look-around"),
    "back": (regex_of(r"(a)\1"), "backreferences"),
    "lark": (lark_of("start: nothing"), "nothing"),
    "gbnf": (lark_of('root ::= ["'), "guided_grammar"),
    "endless": (lark_of('start: start "a"'), "matches no text"),
    "control": (lark_of('start: <|start|> "a"'), "guided_grammar"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_by_name_and_soon(bench: Bench, name: str) -> None:
    grammar, word = HOSTILE[name]
    began = perf_counter()
    with pytest.raises(InvalidRequest) as caught:
        bench.made(grammar)
    assert word in caught.value.message
    assert caught.value.param == grammar.param
    assert len(caught.value.message) < 400
    assert perf_counter() - began < 30


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "((a?){20}){20}a{20}", "(.*a){20}", "(.*x.*y.*z){20}", "(x{100}){100}", r"\w{1,5000}x", "(a|b|ab)*c"],
)
def test_catastrophic_regexes_end_in_bounded_time(bench: Bench, pattern: str) -> None:
    began = perf_counter()
    try:
        made = bench.made(regex_of(pattern), SAMPLED, count=30)
        assert made.finish in (FinishReason.LENGTH, FinishReason.STOP)
    except InvalidRequest:
        pass
    assert perf_counter() - began < 30


def test_masks_that_take_too_long_fail_their_request_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, failed = bench.job(regex_of("[a-z]{50}"), GREEDY, 80, 1)
    good, result = bench.job(regex_of("[a-z]{5}"), GREEDY, 80, 2)
    slow.constraint.seconds = 100.0
    loop = bench.harness.loop()
    loop.add(slow)
    loop.add(good)
    bench.kit.drain(loop)
    assert [type(error) for error in failed.errors] == [InvalidRequest]
    assert len(result.tokens) == 5


def test_an_equal_grammar_is_compiled_once(bench: Bench) -> None:
    asyncio.run(bench.grammars.constraint(bench.job(regex_of("once+"), GREEDY, 5, 1)[0].request))
    before = bench.grammars._compiled[regex_of("once+")]
    bench.job(regex_of("once+"), GREEDY, 5, 1)
    assert bench.grammars._compiled[regex_of("once+")] is before


def test_compiled_grammars_are_bounded(bench: Bench) -> None:
    for number in range(40):
        bench.job(regex_of(f"a{{{number}}}b"), GREEDY, 5, 1)
    assert len(bench.grammars._compiled) <= 32


def test_a_closed_compiler_says_so(harness: Any, tiny_model: Path, bench: Bench) -> None:
    closed = Grammars(bench.tokenizer, bench.token_bytes, harness.target.vocabulary, {bench.end})
    closed.close()
    job, _ = bench.job(regex_of("a"), GREEDY, 5, 1)
    with pytest.raises(AgentSpecError, match="shutting down"):
        asyncio.run(closed.constraint(job.request))


@pytest.mark.parametrize("text", ["plain text", "grün ☃", "<|end|>", "", " a  b\n", "e\u0301"])
def test_the_encoder_spells_every_text_as_it_is(bench: Bench, text: str) -> None:
    encoder = PlainEncoder(bench.tokenizer, bench.token_bytes, 258, {bench.end})
    for piece in (text.encode(), text.encode()[:-1], b"\xff" + text.encode()):
        tokens = encoder(piece)
        assert b"".join(bench.token_bytes[token] for token in tokens) == piece
        assert b"".join(bench.token_bytes[token] for token in encoder.greedy(piece)) == piece


def test_a_grammar_that_failed_is_compiled_afresh(bench: Bench) -> None:
    job, _ = bench.job(regex_of("afresh+"), GREEDY, 5, 1)
    before = bench.grammars._compiled[regex_of("afresh+")]
    with pytest.raises(InvalidRequest, match="too complex"):
        job.constraint.push(bench.tokens("z")[0])
    bench.job(regex_of("afresh+"), GREEDY, 5, 1)
    assert bench.grammars._compiled[regex_of("afresh+")] is not before
