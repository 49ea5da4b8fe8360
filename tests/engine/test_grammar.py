"""Constrained output: always of the grammar, whatever drafts, and the same as without drafts."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from agentspec.types import FinishReason, Grammar, SamplingParams, SpeculationParams
from tests.engine.constrained import GREEDY, OFF, SAMPLED, SAMPLINGS, Bench, lark_of, regex_of, schema_of

OBJECT = {
    "type": "object",
    "properties": {"name": {"const": "get_weather"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bench(harness: Any, kit: Any, tiny_model: Path) -> Bench:
    return Bench(harness, kit, tiny_model)


def random_schema(dice: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of what is supported, small enough that a random model comes to its end."""
    scalars: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", dice.randrange(100), None]},
        {"const": f"fixed {dice.randrange(10)} value"},
        {"type": "integer", "minimum": dice.randrange(-50, 0), "maximum": dice.randrange(1, 500)},
        {"type": "string", "maxLength": dice.randrange(1, 6)},
        {"type": "string", "pattern": "^[a-f]{2,4}$"},
        {"type": "string", "format": "date"},
        {"type": ["boolean", "null"]},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 9},
    ]
    if depth == 0 or dice.random() < 0.3:
        return dice.choice(scalars)
    inner = [random_schema(dice, depth - 1) for _ in range(dice.randrange(1, 4))]
    kind = dice.randrange(5)
    if kind == 0:
        return {"anyOf": inner}
    if kind == 1:
        return {"type": "array", "items": inner[0], "minItems": dice.randrange(3), "maxItems": 3}
    if kind == 2:
        return {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)}
    names = [f"{dice.choice('abc')}{i}" for i in range(len(inner))]
    required = [name for name in names if dice.random() < 0.6]
    fields = dict(zip(names, inner, strict=True))
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def check(bench: Bench, seed: int) -> bool:
    """Whether a random schema's completion came to its end, after it was checked."""
    dice = random.Random(seed)
    schema = random_schema(dice)
    schema = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    kinds = dice.sample([None, "right", "wrong", "random", "illegal"], 2)
    made = bench.agreed(schema_of(schema), dice.choice(SAMPLINGS), count=80, seed=seed, kinds=kinds)
    if made.finish is FinishReason.LENGTH:
        return False
    jsonschema.validate(json.loads(made.text), schema)
    return True


@pytest.mark.parametrize("part", range(3))
def test_random_schemas_are_obeyed_and_unchanged_by_hostile_drafts(bench: Bench, part: int) -> None:
    ended = [check(bench, seed) for seed in range(part * 10, part * 10 + 10)]
    assert sum(ended) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_500_random_schemas(bench: Bench, part: int) -> None:
    ended = [check(bench, 1000 + seed) for seed in range(part * 50, part * 50 + 50)]
    assert sum(ended) >= 25


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (regex_of("(yes|no), [a-z]{3,8}!"), r"(yes|no), [a-z]{3,8}!"),
        (lark_of('start: "red" | "green" | "grün"'), "red|green|grün"),
        (lark_of('root ::= "<" [a-c]+ ">"'), "<[a-c]+>"),
        (lark_of('start: pair ("," pair)*\npair: /[a-z]/ "=" /[0-9]/'), r"[a-z]=\d(,[a-z]=\d)*"),
    ],
)
def test_regexes_choices_and_grammars(bench: Bench, grammar: Grammar, pattern: str, sampling: SamplingParams) -> None:
    made = bench.agreed(grammar, sampling, count=60)
    assert made.finish is FinishReason.LENGTH or re.fullmatch(pattern, made.text)


def test_forced_tokens_are_drafted_and_counted(bench: Bench) -> None:
    """All but the first, which comes with the prompt."""
    plain = bench.made(regex_of("The answer is [0-9]{3} degrees"), speculation=OFF)
    drafted = bench.made(regex_of("The answer is [0-9]{3} degrees"))
    assert drafted.tokens == plain.tokens
    assert plain.report.steps == len(plain.tokens)
    assert drafted.report.drafted["grammar"] == drafted.report.accepted["grammar"] == 13 + 8
    assert drafted.report.steps == 1 + 1 + 3
    assert drafted.report.reason is None


@pytest.mark.parametrize("drafters", [(), ("trajectory", "scope")])
def test_forced_tokens_are_not_drafted_where_they_are_not_allowed(bench: Bench, drafters: tuple[str, ...]) -> None:
    made = bench.made(schema_of(OBJECT), speculation=SpeculationParams(drafters=drafters))
    assert made.report.drafted_total == 0


def test_forced_tokens_keep_to_the_limit(bench: Bench) -> None:
    made = bench.made(schema_of(OBJECT), speculation=SpeculationParams(max_draft_tokens=3))
    assert 0 < made.report.drafted_total <= 3 * made.report.steps
    assert bench.made(schema_of(OBJECT), speculation=SpeculationParams(max_draft_tokens=0)).report.drafted_total == 0


def test_a_complete_grammar_ends_the_turn_at_once(bench: Bench) -> None:
    made = bench.agreed(regex_of("[a-z]{4}"), GREEDY)
    assert (len(made.tokens), made.finish) == (4, FinishReason.STOP)
    exact = bench.agreed(regex_of("[a-z]{4}"), GREEDY, count=4)
    assert (exact.tokens, exact.finish) == (made.tokens, FinishReason.STOP)
    cut = bench.agreed(regex_of("[a-z]{4}"), GREEDY, count=3)
    assert (cut.tokens, cut.finish) == (made.tokens[:3], FinishReason.LENGTH)


def test_the_end_may_come_exactly_where_the_grammar_is_complete(bench: Bench) -> None:
    eager = SamplingParams(logit_bias=((bench.end, 100.0),))
    made = bench.agreed(regex_of("ab+"), eager)
    assert (made.text, made.tokens[-1]) == ("ab", bench.end)
    assert bench.agreed(regex_of("a?"), eager).tokens == (bench.end,)


def test_a_least_length_gives_way_where_only_the_end_is_left(bench: Bench) -> None:
    eager = SamplingParams(logit_bias=((bench.end, 100.0),), min_tokens=5)
    assert bench.agreed(regex_of("ab+"), eager).text == "abbbb"
    assert bench.agreed(regex_of("a|bc"), eager).finish is FinishReason.STOP
    assert bench.agreed(regex_of(""), eager).tokens == (bench.end,)


def test_ignoring_the_end_goes_on_for_as_long_as_the_grammar_can(bench: Bench) -> None:
    eager = SamplingParams(logit_bias=((bench.end, 100.0),))
    made = bench.agreed(regex_of("ab{1,6}"), eager, ignore_eos=True)
    assert (made.text, made.finish) == ("abbbbbb", FinishReason.STOP)


def test_stops_end_constrained_output_too(bench: Bench) -> None:
    stopped = bench.agreed(regex_of("abc[0-9]{9}"), GREEDY, stop=("c",))
    assert (stopped.text, stopped.finish) == ("ab", FinishReason.STOP)
    token = bench.agreed(regex_of("abc[0-9]{9}"), GREEDY, stop_tokens=(stopped.tokens[-1],))
    assert (token.text, token.finish) == ("ab", FinishReason.STOP)
    silent = bench.agreed(
        regex_of("ab+"), SamplingParams(logit_bias=((bench.start, 100.0),)), stop_tokens=(bench.start,)
    )
    assert (silent.text, silent.tokens[-1]) == ("ab", bench.start)


def test_api_34_a_single_legal_token_has_finite_logprobs(bench: Bench) -> None:
    made = bench.made(regex_of("abcdef"), logprobs=5)
    entries = [entry for delta in made.result.deltas for entry in delta.logprobs]
    assert [entry.token for entry in entries] == list(made.tokens)
    assert all(entry.logprob > float("-inf") for entry in entries)


def test_control_tokens_never_come_from_a_grammar(bench: Bench) -> None:
    eager = SamplingParams(logit_bias=((bench.start, 100.0),))
    made = bench.agreed(regex_of("(?s:.{5})"), eager)
    assert bench.start not in made.tokens
    spelled = bench.agreed(schema_of({"const": "<|end|><|start|>"}), GREEDY)
    assert json.loads(spelled.text) == "<|end|><|start|>"


def test_eng_25_thirty_requests_at_once_with_illegal_drafts(bench: Bench) -> None:
    grammar = schema_of({"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]})
    plain = [bench.made(grammar, SAMPLED, 24, seed=seed, speculation=OFF) for seed in range(30)]
    loop = bench.harness.loop(max_running=30)
    results = []
    for seed in range(30):
        job, result = bench.job(grammar, SAMPLED, 24, seed)
        job.drafter = bench.drafter(job, "illegal", plain[seed].tokens, seed)
        loop.add(job)
        results.append(result)
    bench.kit.drain(loop)
    assert all(result.errors == [] for result in results)
    assert [result.tokens for result in results] == [one.tokens for one in plain]


def test_eng_26_the_rest_of_a_run_is_checked_after_the_state_changes(bench: Bench) -> None:
    """Free text up to a marker, a schema after it: a draft that begs for a fence after the marker is cut there."""
    grammar = lark_of(
        'start: think %json {"type":"object","properties":{"a":{"const":1}},"required":["a"],'
        '"additionalProperties":false}\nthink[lazy]: /[a-z]*<.>/'
    )
    eager = bench.eager(**{"<": 9.0})
    plain = bench.made(grammar, eager, speculation=OFF)
    marker = plain.text.index(">") + 1
    fenced = [*plain.tokens[:marker], *bench.tokens("```json")]
    drafted = bench.made(grammar, eager, kind="right", answer=fenced)
    assert drafted.tokens == plain.tokens
    assert json.loads(plain.text[marker:]) == {"a": 1}
