"""`agentspec cache`: counts, checks and carries the histories of a Redis or of a file."""

import asyncio
import base64
import json
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis

from agentspec import cli
from agentspec.cache.codec import Keys
from agentspec.cache.file_store import FileStore
from agentspec.cache.journal import START
from agentspec.cache.redis_store import RedisStore
from agentspec.cache.store import HistoryStore
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory
from tests.redis_process import Server

RUNS = {
    Trajectory("run", Scope("acme", "tiny")): [*range(10_000), -1, 7],
    Trajectory("s/ü", Scope("acme", "tiny")): [150_000, 2**31 - 1],
    Trajectory("run", Scope("other: {x}", "tiny")): [5],
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("AGENTSPEC_")]:
        monkeypatch.delenv(name)


def store_at(flags: list[str]) -> HistoryStore:
    if flags[0] == "--history-file":
        return FileStore(CacheConfig(history_file=flags[1]))
    return RedisStore(CacheConfig(redis_url=flags[1], deadline_ms=3000))


def fill(flags: list[str], runs: dict[Trajectory, list[int]] = RUNS) -> None:
    async def run() -> None:
        store = store_at(flags)
        for trajectory, tokens in runs.items():
            await store.append(trajectory, tokens)
        await store.flush()
        await store.close()

    asyncio.run(run())


def described(flags: list[str]) -> int:
    """Bytes of all runs, as the store tells them one by one."""

    async def run() -> int:
        store = store_at(flags)
        found = [await store.describe(trajectory) for trajectory in RUNS]
        await store.close()
        return sum(one.bytes for one in found if one is not None)

    return asyncio.run(run())


def held(flags: list[str]) -> dict[Trajectory, list[int]]:
    async def run() -> dict[Trajectory, list[int]]:
        store = store_at(flags)
        found = {trajectory: (await store.load(trajectory)).tolist() for trajectory in RUNS}
        await store.close()
        return found

    return asyncio.run(run())


@pytest.fixture(params=["file", "redis"])
def flags(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The flags of an empty store."""
    if request.param == "file":
        return ["--history-file", str(tmp_path / "histories")]
    return ["--redis-url", request.getfixturevalue("redis_server").url]


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert cli.main(["cache", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_stats_are_by_tenant_and_model(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    fill(flags)
    found = told(capsys, "stats", *flags)
    assert (found["trajectories"], found["tokens"], found["turns"]) == (3, 10_005, 3)
    assert found["stored_bytes"] > 20_000 and found["newer_version"] == 0
    rows = {row["tenant"]: row["tokens"] for row in found["scopes"]}
    assert rows == {"acme": 10_004, "other: {x}": 1}
    assert cli.main(["cache", "stats", *flags]) == 0
    out = capsys.readouterr().out
    assert "10,004" in out and "other: {x}" in out and "total" in out


def test_bytes_are_those_of_the_file_and_of_what_each_trajectory_is_said_to_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "histories"
    flags, first = ["--history-file", str(file)], next(iter(RUNS))
    fill(flags)

    assert told(capsys, "stats", *flags)["stored_bytes"] == described(flags) == file.stat().st_size - len(START)
    fill(flags, {first: [9]})
    assert told(capsys, "stats", *flags)["stored_bytes"] == file.stat().st_size - len(START) > described(flags)


def test_bytes_of_a_redis_are_those_of_what_each_trajectory_is_said_to_take(
    capsys: pytest.CaptureFixture[str], redis_server: Server
) -> None:
    flags = ["--redis-url", redis_server.url]
    fill(flags)

    assert told(capsys, "stats", *flags)["stored_bytes"] == described(flags)


def test_an_export_makes_an_equal_store(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, redis_server: Server
) -> None:
    file, out = ["--history-file", str(tmp_path / "first")], str(tmp_path / "out.jsonl")
    redis, again = ["--redis-url", redis_server.url], ["--history-file", str(tmp_path / "second")]
    fill(file)
    assert told(capsys, "export", *file, "--out", out) == {"exported": 3, "left_out": 0}
    assert Path(out).stat().st_mode & 0o777 == 0o600, "it holds what was said, like the history file"
    assert told(capsys, "import", *redis, out) == {"imported": 3, "kept": 0}
    assert told(capsys, "export", *redis, "--out", out) == {"exported": 3, "left_out": 0}
    assert told(capsys, "import", *again, out) == {"imported": 3, "kept": 0}
    assert held(file) == held(redis) == held(again) == RUNS
    for place in (redis, again):
        assert told(capsys, "verify", *place)["problems"] == []


def test_an_import_leaves_what_is_there_unless_told(
    capsys: pytest.CaptureFixture[str], flags: list[str], tmp_path: Path
) -> None:
    out, first = str(tmp_path / "out.jsonl"), next(iter(RUNS))
    fill(flags)
    told(capsys, "export", *flags, "--out", out)
    fill(flags, {first: [9]})
    assert told(capsys, "import", *flags, out) == {"imported": 0, "kept": 3}
    assert held(flags)[first][-1] == 9
    assert told(capsys, "import", "--replace", *flags, out) == {"imported": 3, "kept": 0}
    assert held(flags) == RUNS


def test_lines_can_be_read_without_agentspec(
    capsys: pytest.CaptureFixture[str], flags: list[str], tmp_path: Path
) -> None:
    fill(flags)
    assert cli.main(["cache", "export", *flags, "--out", str(tmp_path / "out.jsonl")]) == 0
    assert "3 exported" in capsys.readouterr().err
    first, *lines, last = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert first == {"format": "agentspec-histories", "version": 1}
    assert last == {"trajectories": 3}
    for line in lines:
        data = zlib.decompress(base64.b64decode(line["data"]))
        trajectory = Trajectory(line["id"], Scope(line["tenant"], line["model"]))
        assert np.frombuffer(data, "<i4").tolist() == RUNS[trajectory]
        assert zlib.crc32(data) == line["crc32"] and line["turns"] == 1 and line["updated"] > 1.7e9


def test_verify_names_damage_in_redis(capsys: pytest.CaptureFixture[str], redis_server: Server) -> None:
    flags, keys = ["--redis-url", redis_server.url], Keys.of(next(iter(RUNS)))
    fill(flags)
    with Redis.from_url(redis_server.url) as client:
        chunk = client.lindex(keys.tokens, 1)
        client.lset(keys.tokens, 1, chunk[:-1] + b"\xff")
        client.persist(keys.meta)
        client.set("as:{a:b:c}:tok", "no list")
        client.set("somebody else's", "value")
    found = told(capsys, "verify", *flags, code=1)
    assert {(entry["trajectory"], entry["problem"]) for entry in found["problems"]} == {
        ("acme/tiny/run", "1 of 3 chunks are damaged"),
        ("acme/tiny/run", "never expires"),
        ("a/b/c", "is no list"),
    }
    assert cli.main(["cache", "verify", *flags]) == 1
    assert "3 problems" in capsys.readouterr().out


@pytest.mark.parametrize(("at", "problem"), [(-1, "ends in a write that was interrupted"), (40, "is damaged")])
def test_verify_names_damage_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, at: int, problem: str
) -> None:
    path = tmp_path / "histories"
    fill(["--history-file", str(path)])
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    found = told(capsys, "verify", "--history-file", str(path), code=1)
    assert [entry["problem"].split(" at byte")[0] for entry in found["problems"]] == [problem]
    assert path.read_bytes() == data


def spoil(change: Callable[[list[str]], list[str]]) -> Callable[[list[str]], str]:
    return lambda lines: "".join(f"{line}\n" for line in change(lines))


def with_field(**fields: Any) -> Callable[[list[str]], str]:
    return spoil(lambda lines: [lines[0], json.dumps({**json.loads(lines[1]), **fields}), *lines[2:]])


BOMB = base64.b64encode(zlib.compress(bytes(10**7))).decode()


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (spoil(lambda lines: lines[:-1]), "ends before its last line"),
        (spoil(lambda lines: []), "ends before its last line"),
        (spoil(lambda lines: [*lines[:2], lines[-1]]), "1 trajectories came before it"),
        (spoil(lambda lines: [*lines, lines[1]]), "line 6: nothing may follow"),
        (spoil(lambda lines: ["{}", *lines[1:]]), "line 1: this is no export"),
        (spoil(lambda lines: ["[]", *lines[1:]]), "line 1: this is no export"),
        (spoil(lambda lines: ['{"format": "agentspec-histories", "version": 7}']), "line 1: version 7 is not known"),
        (spoil(lambda lines: [lines[0], "not json"]), "line 2: "),
        (spoil(lambda lines: [lines[0], "[" * 10_000]), "line 2: "),
        (with_field(tokens=3), "line 2: the tokens are damaged"),
        (with_field(tokens=True), "line 2: the names are too long"),
        (with_field(crc32=1), "line 2: the tokens are damaged"),
        (with_field(data="***"), "line 2: "),
        (with_field(data=BOMB, tokens=1), "line 2: the tokens are damaged"),
        (with_field(tenant=None), "line 2: tenant, model and id"),
        (with_field(id="x" * 999), "line 2: the names are too long"),
        (lambda lines: "\x00\xff", "line 1: "),
    ],
)
def test_a_damaged_export_is_named_and_nothing_is_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, damaged: Callable[[list[str]], str], message: str
) -> None:
    flags, out = ["--history-file", str(tmp_path / "histories")], tmp_path / "out.jsonl"
    fill(["--history-file", str(tmp_path / "other")])
    cli.main(["cache", "export", "--history-file", str(tmp_path / "other"), "--out", str(out)])
    out.write_text(damaged(out.read_text().splitlines()))
    capsys.readouterr()
    assert cli.main(["cache", "import", *flags, str(out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("agentspec: ") and error.count("\n") == 1 and message in error
    assert not Path(flags[1]).exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["stats"], 2, "no store is configured: give --redis-url or --history-file"),
        (["import", "x"], 2, "no store is configured"),
        (["stats", "--redis-url", "redis://a", "--history-file", "b"], 2, "are both set; choose one"),
        (["stats", "--history-file", "missing"], 1, "cannot read missing"),
        (["stats", "--history-file", "."], 1, "cannot read ."),
        (["verify", "--history-file", "text"], 1, "text is no file of histories"),
        (["stats", "--redis-url", "redis://127.0.0.1:1/0"], 1, "cannot read the Redis of --redis-url"),
        (["verify", "--redis-url", "junk"], 2, "--redis-url must be a Redis URL"),
        (["export", "--history-file", "old", "--out", "pipe"], 2, "'pipe' is no plain file, and would be replaced"),
        (["export", "--history-file", "old", "--out", "./old"], 2, "'old' is the history file itself"),
        (["import", "--history-file", "new", "missing"], 1, "missing: No such file"),
        (["import", "--redis-url", "redis://127.0.0.1:1/0", "good"], 1, "the store takes no more"),
        (["import", "--history-file", "new", "/dev/null"], 1, "/dev/null is neither a plain file nor a pipe"),
        (["import", "--history-file", "new", "."], 1, ".: Is a directory"),
        (["stats", "--history-file", "~no-such-user/x"], 2, "'~no-such-user/x' is no path"),
        (["export", "--history-file", "~no-such-user/x", "--out", "y"], 2, "'~no-such-user/x' is no path"),
        (["import", "--history-file", "~no-such-user/x", "good"], 2, "'~no-such-user/x' is no path"),
        (["stats", "--history-file", "a\0b"], 2, r"'a\x00b' is no path"),
        (["export", "--history-file", "a\0b", "--out", "y"], 2, r"'a\x00b' is no path"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("hello")
    os.mkfifo("pipe")
    fill(["--history-file", "old"])
    cli.main(["cache", "export", "--history-file", "old", "--out", "good"])
    capsys.readouterr()
    assert cli.main(["cache", *words]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("agentspec: ") and message in error


@pytest.mark.parametrize("name", ["", "a\0b"])
@pytest.mark.parametrize("words", [["export", "--out"], ["import"]])
def test_a_name_that_no_file_has_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], name: str
) -> None:
    flags = ["--history-file", str(tmp_path / "histories")]
    fill(flags)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["cache", words[0], *flags, *words[1:], name])
    assert f"{name!r} is no name of a file" in capsys.readouterr().err.splitlines()[-1]


def test_an_import_reads_a_pipe_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags, out, pipe = ["--history-file", str(tmp_path / "first")], tmp_path / "out", tmp_path / "pipe"
    fill(flags)
    told(capsys, "export", *flags, "--out", str(out))
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(out.read_bytes()))
    writer.start()
    again = ["--history-file", str(tmp_path / "second")]
    assert told(capsys, "import", *again, str(pipe)) == {"imported": 3, "kept": 0}
    writer.join(10)
    assert held(again) == RUNS


def test_an_import_into_a_file_in_use_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags, out = ["--history-file", str(tmp_path / "histories")], str(tmp_path / "out")
    fill(flags)
    cli.main(["cache", "export", *flags, "--out", out])

    async def run() -> None:
        store = store_at(flags)
        assert await asyncio.to_thread(cli.main, ["cache", "stats", *flags]) == 0
        await store.close()

    asyncio.run(run())
    store = FileStore(CacheConfig(history_file=flags[1]))
    assert cli.main(["cache", "import", *flags, out]) == 2
    assert "in use by another process" in capsys.readouterr().err
    store.journal.close()
