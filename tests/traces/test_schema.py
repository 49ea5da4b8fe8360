"""What a trace may hold, and how its faults are named."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import TraceError
from agentspec.traces.schema import encode_trace, parse_trace


def call(identifier: str, name: str = "look", arguments: str = "{}") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


VALID: dict[str, Any] = {
    "id": "demo/one",
    "source": "demo",
    "domain": "swe",
    "model": "some-model",
    "group": "task",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look twice.", "name": "sam"},
        {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b")], "reasoning_content": "hm"},
        {"role": "tool", "content": "second", "tool_call_id": "b", "name": "look"},
        {"role": "tool", "content": "first", "tool_call_id": "a"},
        {"role": "assistant", "content": "Done."},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "meta": {"generated": [2, 5], "reward": 1},
}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """The valid record with one value replaced."""
    record = copy.deepcopy(VALID)
    place: Any = record
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return record


def test_trace_has_what_was_recorded() -> None:
    trace = parse_trace(VALID)
    assert (trace.id, trace.source, trace.domain, trace.model, trace.group) == (
        "demo/one", "demo", "swe", "some-model", "task",
    )  # fmt: skip
    assert list(trace.messages) == VALID["messages"]
    assert trace.generated == (2, 5)
    assert [(turn.index, len(turn.prompt)) for turn in trace.turns()] == [(2, 2), (5, 5)]


def test_encoded_trace_is_the_record_in_one_line() -> None:
    line = encode_trace(parse_trace(VALID))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == VALID


def test_optional_fields_may_be_absent_and_stay_absent() -> None:
    record = {name: VALID[name] for name in ("id", "source", "domain", "messages")}
    trace = parse_trace(record)
    assert (trace.model, trace.group, trace.tools, trace.meta) == (None, None, None, {})
    assert json.loads(encode_trace(trace)) == record


def test_without_generated_all_assistant_turns_are() -> None:
    assert parse_trace(changed("meta", to={})).generated == (2, 5)
    assert parse_trace(changed("meta", "generated", to=[5])).generated == (5,)


def test_turn_without_a_prompt_cannot_be_replayed() -> None:
    record = {**VALID, "messages": [{"role": "assistant", "content": "Hi."}], "meta": {}}
    assert list(parse_trace(record).turns()) == []


def test_text_that_is_not_unicode_survives() -> None:
    trace = parse_trace(changed("messages", 5, "content", to="half \ud83d"))
    assert json.loads(encode_trace(trace))["messages"][5]["content"] == "half \ud83d"


FAULTS: list[tuple[dict[str, Any], str]] = [
    (changed("id", to=""), "id must be a string that is not empty, got ''"),
    (changed("domain", to=3), "domain must be a string that is not empty, got 3"),
    (changed("model", to=[]), r"model must be a string, got \[\]"),
    (changed("extra", to=1), "unknown field 'extra'"),
    (changed("messages", to=[]), "messages must be a list that is not empty"),
    (changed("messages", 1, to="hi"), r"messages\[1\] must be an object"),
    (changed("messages", 1, "role", to="human"), r"messages\[1\].role must be one of system, .* got 'human'"),
    (changed("messages", 1, "content", to=None), r"messages\[1\].content must be a string, got None"),
    (changed("messages", 1, "content", to=[{"type": "text"}]), r"messages\[1\].content must be a string"),
    (changed("messages", 1, "tool_calls", to=[]), r"messages\[1\]: a message of role user has no field 'tool_calls'"),
    (changed("messages", 2, "tool_calls", to=[]), r"messages\[2\].tool_calls must be a list that is not empty"),
    (
        changed("messages", 2, "tool_calls", 1, "type", to="x"),
        r"messages\[2\].tool_calls\[1\] must be an object",
    ),
    (changed("messages", 2, "tool_calls", 0, "id", to=""), r"messages\[2\].tool_calls\[0\].id must be a string"),
    (
        changed("messages", 2, "tool_calls", 0, "function", "name", to=""),
        r"messages\[2\].tool_calls\[0\].function.name must be",
    ),
    (
        changed("messages", 2, "tool_calls", 0, "function", "arguments", to={}),
        r"messages\[2\].tool_calls\[0\].function.arguments must be",
    ),
    (changed("tools", to={}), "tools must be a list"),
    (changed("tools", 0, "type", to="other"), r"tools\[0\] must be a function with a name"),
    (changed("meta", to=[]), "meta must be an object"),
    (changed("meta", "generated", to=[2, 2, 5]), "meta.generated must be in ascending order"),
    (changed("meta", "generated", to=[1, 5]), r"meta.generated: messages\[1\] is not an assistant message"),
    (changed("meta", "generated", to=[6]), "meta.generated must list indices from 0 to 5"),
    (changed("meta", "generated", to=[True, 5]), "meta.generated must list indices"),
    (changed("meta", "generated", to=[2]), "meta.generated must hold the last message"),
    (changed("messages", 5, to={"role": "user", "content": "?"}), r"messages\[5\]: a trace must end with an assistant"),
]


@pytest.mark.parametrize(("record", "message"), FAULTS)
def test_fault_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=f"^{message}"):
        parse_trace(record)


def test_trc_05_result_of_an_unknown_call_is_refused() -> None:
    with pytest.raises(TraceError, match=r"^messages\[4\].tool_call_id: no earlier call has the id 'zz'"):
        parse_trace(changed("messages", 4, "tool_call_id", to="zz"))


def test_trc_05_result_before_its_call_is_refused() -> None:
    messages = VALID["messages"]
    with pytest.raises(TraceError, match=r"^messages\[2\].tool_call_id: no earlier call has the id 'b'"):
        parse_trace({**VALID, "messages": [*messages[:2], messages[3], *messages[2:]], "meta": {}})


def test_trc_05_two_calls_with_one_id_are_refused() -> None:
    with pytest.raises(TraceError, match=r"^messages\[2\].tool_calls\[1\]: the id 'a' was used before"):
        parse_trace(changed("messages", 2, "tool_calls", 1, "id", to="a"))


def test_trc_05_second_result_of_a_call_is_refused() -> None:
    with pytest.raises(TraceError, match=r"^messages\[4\].tool_call_id: the call 'b' has a result already"):
        parse_trace(changed("messages", 4, "tool_call_id", to="b"))


def test_example_of_the_format_page_is_a_trace() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "format" / "trace.md").read_text(encoding="utf-8")
    example = page.split("```json\n")[1].split("```")[0]
    assert parse_trace(json.loads(example)).generated == (1, 3)
