"""Facts about the shipped recordings, checked on the files themselves."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "traces" / "recorded"
DOMAIN_OF_FILE = {"browsing.jsonl": "browsing", "software.jsonl": "swe", "tools.jsonl": "tool_calling"}
DEMONSTRATION = ("recorded/inventory-reservations", "recorded/order-exchange")
ROLES = {"system", "user", "assistant", "tool"}
ADDRESS = re.compile(r"[\w.+-]*\w@(\w[\w-]*(?:\.[\w-]+)+)")
OUR_HOST = re.compile(r"(?:[\w-]+\.)*example\.(?:com|org|net)")
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|home|root|tmp|Users|usr|opt|mnt|var|private)/|[A-Z]:\\\\")

Record = dict[str, Any]


def records_of(file: str) -> list[Record]:
    return [json.loads(line) for line in (FOLDER / file).read_text(encoding="utf-8").splitlines()]


RECORDS = {record["id"]: record for file in sorted(DOMAIN_OF_FILE) for record in records_of(file)}

each_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())


def assistant_turns(record: Record) -> list[Record]:
    return [message for message in record["messages"] if message["role"] == "assistant"]


def texts_of(value: Any) -> Iterator[str]:
    """Every string inside, and the strings inside tool-call arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from texts_of(json.loads(item["arguments"]) if name == "function" and "arguments" in item else item)


def test_folder_holds_one_file_per_domain_and_the_readme() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*DOMAIN_OF_FILE, "README.md"}


def test_files_are_at_most_one_megabyte_together() -> None:
    assert 0 < sum((FOLDER / file).stat().st_size for file in DOMAIN_OF_FILE) <= 1_000_000


@pytest.mark.parametrize("file", sorted(DOMAIN_OF_FILE))
def test_each_line_is_one_record_of_the_files_domain(file: str) -> None:
    records = records_of(file)
    assert len(records) >= 3
    assert {record["domain"] for record in records} == {DOMAIN_OF_FILE[file]}


def test_ids_are_unique() -> None:
    assert len(RECORDS) == sum(len(records_of(file)) for file in DOMAIN_OF_FILE)


def test_there_are_about_ten_with_enough_turns() -> None:
    assert 8 <= len(RECORDS) <= 12
    assert sum(len(assistant_turns(record)) for record in RECORDS.values()) >= 120


@each_record
def test_record_has_the_fields_of_the_schema(record: Record) -> None:
    assert re.fullmatch(r"recorded/[a-z0-9-]+", record["id"])
    assert record["source"] == "recorded"
    assert set(record) <= {"id", "source", "domain", "messages", "tools", "meta"}
    assert record["meta"]["style"]


@each_record
def test_record_has_ten_to_forty_assistant_turns(record: Record) -> None:
    assert 10 <= len(assistant_turns(record)) <= 40


@each_record
def test_roles_come_in_order(record: Record) -> None:
    roles = [message["role"] for message in record["messages"]]
    assert set(roles) <= ROLES
    assert roles[:3] == ["system", "user", "assistant"]
    assert roles[-1] == "assistant"
    assert "system" not in roles[1:]
    assert not {("assistant", "assistant"), ("user", "user")} & set(pairwise(roles))


@each_record
def test_content_is_text_or_null_on_a_pure_tool_call(record: Record) -> None:
    for message in record["messages"]:
        if message["content"] is None:
            assert message["role"] == "assistant" and message["tool_calls"]
        elif message["role"] == "tool":
            assert isinstance(message["content"], str)
        else:
            assert message["content"].strip()


@each_record
def test_tool_replies_follow_their_calls(record: Record) -> None:
    waiting: list[tuple[str, str]] = []
    for message in record["messages"]:
        if message["role"] == "tool":
            assert waiting, "a tool reply without a call"
            assert (message["tool_call_id"], message["name"]) == waiting.pop(0)
        else:
            assert not waiting, f"calls without a reply: {waiting}"
            waiting = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", [])]
    assert not waiting


def test_tool_call_ids_are_unique_over_all_records() -> None:
    ids = [
        call["id"]
        for record in RECORDS.values()
        for turn in assistant_turns(record)
        for call in turn.get("tool_calls", [])
    ]
    assert len(ids) == len(set(ids)) > 50


@each_record
def test_calls_fit_the_schemas_of_their_tools(record: Record) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in record.get("tools", [])}
    for turn in assistant_turns(record):
        for call in turn.get("tool_calls", []):
            schema = schemas[call["function"]["name"]]
            arguments = json.loads(call["function"]["arguments"])
            assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])


def test_styles_vary() -> None:
    turns = [turn for record in RECORDS.values() for turn in assistant_turns(record)]
    assert any("tools" not in record for record in RECORDS.values())
    assert any(len(turn.get("tool_calls", [])) > 1 for turn in turns)
    assert any(turn.get("reasoning_content") for turn in turns)


def test_the_demonstration_pair_is_compact() -> None:
    for name in DEMONSTRATION:
        record = RECORDS[name]
        fourth = [at for at, message in enumerate(record["messages"]) if message["role"] == "assistant"][3]
        head = json.dumps([record["tools"], record["messages"][: fourth + 1]])
        assert len(head) < 7_000, name


@each_record
def test_no_personal_address_and_no_machine_path(record: Record) -> None:
    text = "\n".join(texts_of(record))
    assert [host for host in ADDRESS.findall(text) if not OUR_HOST.fullmatch(host)] == []
    assert [match.group() for match in MACHINE_PATH.finditer(text)] == []


def test_readme_lists_every_record_with_its_turns() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)`[^|]*\| ([a-z_]+) \| (\d+) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M
    )
    assert {f"recorded/{name}": (domain, int(turns)) for name, domain, turns in rows} == {
        name: (record["domain"], len(assistant_turns(record))) for name, record in RECORDS.items()
    }
