"""Conversations that clients logged become traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec import cli
from agentspec.errors import TraceError
from agentspec.traces.files import read_traces
from agentspec.traces.importer import ImportOptions, import_traces
from agentspec.traces.plain import as_trace
from agentspec.traces.schema import parse_trace

CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "run", "parameters": {}}}
LOGGED: dict[str, Any] = {
    "messages": [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Which "}, {"type": "text", "text": "files?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
        {"role": "tool", "content": "notes.txt", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "One.", "tool_calls": [], "audio": None},
        {"role": "user", "content": "Thanks."},
    ],
    "tools": [TOOL],
    "parallel_tool_calls": True,
    "model": None,
}


def test_a_logged_conversation_is_replayable() -> None:
    trace = parse_trace(as_trace(LOGGED, "logs/day.one.jsonl:7"))
    assert (trace.id, trace.source, trace.domain, trace.model) == ("day/7", "day", "other", None)
    assert list(trace.messages) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Which files?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "notes.txt", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "One."},
    ]
    assert trace.tools == (TOOL,) and trace.generated == (2, 4)


def test_names_that_are_given_stay() -> None:
    named = {**LOGGED, "id": "mine", "domain": "swe", "model": "m", "meta": {"reward": 1}}
    trace = parse_trace(as_trace(named, "a.jsonl:1"))
    assert (trace.id, trace.source, trace.domain, trace.model, trace.meta) == ("mine", "a", "swe", "m", {"reward": 1})


def test_traces_are_what_they_were() -> None:
    recorded = next(read_traces(sorted(Path("traces/recorded").glob("*.jsonl"))))
    line = json.loads(Path("traces/recorded/browsing.jsonl").read_text().splitlines()[0])
    assert parse_trace(as_trace(line, "x:1")) == recorded


IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "a trace must be a JSON object"),
        ({}, "messages must be a list that is not empty"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages\\[0\\]: a trace must end with an assistant turn"),
        ({"messages": ["hi"]}, "messages\\[0\\] must be an object"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages\\[0\\].role must be one of"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages\\[0\\].content must be a string"),
        ({"messages": [{"role": "user", "content": None}]}, "messages\\[0\\].content must be a string"),
    ],
)
def test_what_cannot_be_one_is_refused_by_name(content: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        parse_trace(as_trace(content, "a.jsonl:1"))


def test_the_command_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "runs.jsonl"
    log.write_text(f"{json.dumps(LOGGED)}\n\n{json.dumps(LOGGED)}\n")
    assert cli.main(["traces", "import", str(log), "--out", str(out)]) == 1
    assert cli.main(["traces", "import", str(log), "--plain", "--out", str(out)]) == 0
    assert capsys.readouterr().err.endswith("runs.jsonl: 2 of 2 runs, 0 repaired, 0 refused\n")
    assert [trace.id for trace in read_traces([out])] == ["log/1", "log/3"]


def test_ambiguous_calls_are_repaired_after_they_were_made_plain(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "runs.jsonl"
    twice = [*LOGGED["messages"][:4], *LOGGED["messages"][2:5]]
    log.write_text(json.dumps({"messages": twice}))
    count = import_traces([log], out, ImportOptions(plain=True, repair=True))
    assert (count.written, count.repaired) == (1, 1)
