"""Trace files: reading, writing, importing, counting."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import TraceError
from agentspec.traces.files import read_traces, write_traces
from agentspec.traces.importer import ImportCount, ImportOptions, import_traces
from agentspec.traces.schema import parse_trace
from agentspec.traces.statistics import count_traces


def record(identifier: str, turns: int = 2, domain: str = "swe") -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"question {turn}"},
            {"role": "assistant", "content": f"answer {turn}"},
        ]
    return {"id": identifier, "source": "demo", "domain": domain, "messages": messages}


def record_with_calls(identifier: str, ids: list[str], answers: list[str]) -> dict[str, Any]:
    """One call a turn, each followed by its result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for at, (call_id, answer_id) in enumerate(zip(ids, answers, strict=True)):
        function = {"name": "step", "arguments": f'{{"n": {at}}}'}
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": answer_id, "content": f"result {at}"})
    messages.append({"role": "assistant", "content": "done"})
    return {"id": identifier, "source": "demo", "domain": "os", "messages": messages}


def write(path: Path, *records: Any) -> Path:
    text = "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz"])
def test_files_are_read_in_order_and_blank_lines_skipped(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, record("a"), "", record("b", turns=1))
    assert [(trace.id, len(trace.generated)) for trace in read_traces([path])] == [("a", 2), ("b", 1)]


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.jsonl", record("a"), "not json")
    traces = read_traces([path])
    assert next(traces).id == "a"
    with pytest.raises(TraceError, match=r"runs.jsonl:2: not JSON: Expecting value at column 1"):
        next(traces)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "a trace must be a JSON object"),
        ('{"id": NaN}', "NaN is not a JSON value"),
        ("[" * 100_000, "nested too deeply"),
        ({**record("a"), "domain": None}, "domain must be a string"),
    ],
)
def test_fault_names_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "runs.jsonl", record("first"), line)
    with pytest.raises(TraceError, match=f"runs.jsonl:2: {message}"):
        list(read_traces([path]))


def test_id_used_twice_is_refused_over_all_files(tmp_path: Path) -> None:
    first, second = write(tmp_path / "one.jsonl", record("a")), write(tmp_path / "two.jsonl", record("a"))
    with pytest.raises(TraceError, match=r"two.jsonl:1: the id 'a' was used before, at .*one.jsonl:1"):
        list(read_traces([first, second]))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing.jsonl: cannot be read: No such file"):
        list(read_traces([tmp_path / "missing.jsonl"]))
    (tmp_path / "plain.gz").write_bytes(b"not gzip at all")
    with pytest.raises(TraceError, match=r"plain.gz:1: cannot be read"):
        list(read_traces([tmp_path / "plain.gz"]))
    whole = write(tmp_path / "whole.jsonl.gz", record("a"), record("b")).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(TraceError, match=r"cut.jsonl.gz:\d: cannot be read"):
        list(read_traces([tmp_path / "cut.jsonl.gz"]))
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}\n')
    with pytest.raises(TraceError, match=r"latin.jsonl:1: cannot be read"):
        list(read_traces([tmp_path / "latin.jsonl"]))


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_written_traces_read_back_equal(tmp_path: Path, name: str) -> None:
    traces = [parse_trace(record("a")), parse_trace(record_with_calls("ü 中", ["x", "y"], ["x", "y"]))]
    assert write_traces(traces, tmp_path / name) == 2
    assert list(read_traces([tmp_path / name])) == traces
    first = (tmp_path / name).read_bytes()
    write_traces(traces, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_failed_import_leaves_the_old_file(tmp_path: Path) -> None:
    target = write(tmp_path / "out.jsonl", record("old"))
    source = write(tmp_path / "in.jsonl", record("a"), "{")
    with pytest.raises(TraceError, match=r"in.jsonl:2"):
        import_traces([source], target, ImportOptions())
    assert [trace.id for trace in read_traces([target])] == ["old"]
    with pytest.raises(TraceError, match=r"nowhere/out.jsonl: cannot be written"):
        import_traces([source], tmp_path / "nowhere" / "out.jsonl", ImportOptions())


def test_import_cuts_after_the_first_turns(tmp_path: Path) -> None:
    marked = {**record("b", turns=3), "meta": {"generated": [3, 5], "reward": 1}}
    source = write(tmp_path / "in.jsonl", record("a", turns=1), marked, record("c", turns=4))
    count = import_traces([source], tmp_path / "out.jsonl", ImportOptions(first_turns=1))
    assert count == ImportCount(read=3, written=3, repaired=0, skipped=0)
    kept = {trace.id: trace for trace in read_traces([tmp_path / "out.jsonl"])}
    assert {name: len(trace.messages) for name, trace in kept.items()} == {"a": 2, "b": 4, "c": 2}
    assert kept["b"].meta == {"generated": [3], "reward": 1}


def test_import_draws_the_same_runs_for_the_same_seed(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(record(f"run-{at:02}") for at in range(40)))

    def drawn(seed: int) -> list[str]:
        import_traces([source], tmp_path / "out.jsonl", ImportOptions(limit=5, seed=seed))
        return [trace.id for trace in read_traces([tmp_path / "out.jsonl"])]

    first = drawn(1)
    assert len(set(first)) == 5 and first == sorted(first)
    assert drawn(1) == first
    assert len({tuple(drawn(seed)) for seed in range(8)}) > 1
    assert {name for seed in range(60) for name in drawn(seed)} >= {"run-00", "run-39"}


def test_limit_above_the_number_of_runs_keeps_all(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", record("a"), record("b"))
    assert import_traces([source], tmp_path / "out.jsonl", ImportOptions(limit=9)).written == 2


AMBIGUOUS = record_with_calls("twice", ["same", "same"], ["same", "same"])
LOST = record_with_calls("lost", ["x", "y"], ["x", "other"])


def test_trc_05_ambiguous_call_ids_are_refused_with_line_and_message(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", record("a"), AMBIGUOUS)
    with pytest.raises(TraceError, match=r"in.jsonl:2: messages\[3\].tool_calls\[0\]: the id 'same' was used before"):
        import_traces([source], tmp_path / "out.jsonl", ImportOptions())


@pytest.mark.parametrize("broken", [AMBIGUOUS, LOST])
def test_trc_05_ambiguous_call_ids_are_repaired_by_order_on_demand(tmp_path: Path, broken: dict[str, Any]) -> None:
    source = write(tmp_path / "in.jsonl", record("a"), broken)
    count = import_traces([source], tmp_path / "out.jsonl", ImportOptions(repair=True))
    assert count == ImportCount(read=2, written=2, repaired=1, skipped=0)
    fixed = list(read_traces([tmp_path / "out.jsonl"]))[1]
    assert [call["id"] for message in fixed.messages for call in message.get("tool_calls", ())] == ["call_0", "call_1"]
    assert [message["tool_call_id"] for message in fixed.messages if message["role"] == "tool"] == ["call_0", "call_1"]
    assert [message["content"] for message in fixed.messages] == [message["content"] for message in broken["messages"]]


def test_trc_05_result_without_any_open_call_cannot_be_repaired(tmp_path: Path) -> None:
    stray = record("stray")
    stray["messages"].insert(1, {"role": "tool", "tool_call_id": "x", "content": "?"})
    source = write(tmp_path / "in.jsonl", stray)
    with pytest.raises(TraceError, match=r"in.jsonl:1: messages\[1\]: a tool result that no call is open for"):
        import_traces([source], tmp_path / "out.jsonl", ImportOptions(repair=True))


def test_refused_runs_are_skipped_and_counted_on_demand(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", record("a"), AMBIGUOUS, record("a"), {"id": "x"}, record("b"))
    count = import_traces([source], tmp_path / "out.jsonl", ImportOptions(skip_invalid=True))
    assert count == ImportCount(read=5, written=2, repaired=0, skipped=3)


def test_counts() -> None:
    traces = [parse_trace(record("a")), parse_trace(record_with_calls("b", ["x"], ["x"]))]
    assert count_traces(traces) == {
        "trajectories": 2,
        "turns": 4,
        "messages": 8,
        "tool_calls": 1,
        "characters": len("answer 0answer 1") + len("step") + len('{"n": 0}') + len("done"),
        "with_tools": 0,
        "domains": {"os": 1, "swe": 1},
    }


def test_trc_02_three_megabytes_of_a_tool_are_kept_whole(tmp_path: Path) -> None:
    content = record_with_calls("big", ["a"], ["a"])
    content["messages"][2]["content"] = "line of output\n" * 200_000
    trace = parse_trace(content)
    for name in ("big.jsonl", "big.jsonl.gz"):
        write_traces([trace], tmp_path / name)
        assert list(read_traces([tmp_path / name])) == [trace]
