"""The command line given what it cannot use: one line that says so, never a traceback."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec import cli
from tests.full_disk import full_disk

ROOT = Path(__file__).resolve().parents[1]
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AGENTSPEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def record(identifier: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    return {"id": identifier, "source": "demo", "domain": "swe", "messages": messages}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(record(f"run/{at}")) + "\n" for at in range(4)))
    return path


def one_line(captured: str, *parts: str) -> bool:
    """Whether something is said in one line, without a traceback."""
    return captured.startswith("agentspec: ") and captured.count("\n") == 1 and all(part in captured for part in parts)


BAD_FILES: dict[str, bytes] = {
    "binary.jsonl": bytes(range(256)),
    "binary.jsonl.gz": bytes(range(256)),
    "cut.jsonl.gz": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab",
    "nul.jsonl": b"\x00" * 100,
    "deep.jsonl": b"[" * 100_000,
    "digits.jsonl": b'{"id": ' + b"9" * 9000 + b"}",
    "infinite.jsonl": json.dumps(record("a")).replace('"swe"', '"swe", "meta": {"x": 1e999}').encode(),
    "nan.jsonl": b'{"id": NaN}',
    "list.jsonl": b"[]",
    "page.jsonl": b"<!doctype html>",
}


@pytest.mark.parametrize("command", [["traces", "validate"], ["traces", "stats"], ["replay", "--url", NOWHERE]])
@pytest.mark.parametrize(
    "name", [*BAD_FILES, "missing.jsonl", "folder", "folder/inside", "x" * 300, "file/below.jsonl"]
)
def test_files_that_cannot_be_read_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, command: list[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    path = tmp_path / name
    if name in BAD_FILES:
        path.write_bytes(BAD_FILES[name])
    assert cli.main([*command, str(path)]) == 1
    assert one_line(capsys.readouterr().err, str(path))


def test_files_without_permission_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(runs))

    monkeypatch.setattr(Path, "open", refused)
    assert cli.main(["traces", "validate", str(runs)]) == 1
    assert one_line(capsys.readouterr().err, str(runs), "Permission denied")


@pytest.mark.parametrize("target", ["", ".", "/", "folder", "missing/x.jsonl", "file/x.jsonl", "x" * 300 + ".jsonl"])
def test_targets_that_cannot_be_written_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: Path, target: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    out = str(tmp_path / target) if target not in ("", ".", "/") else target
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["traces", "import", str(runs), "--out", out]) == 1
    assert one_line(capsys.readouterr().err, str(Path(out)))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_the_old_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    with full_disk():
        code = cli.main(["traces", "import", str(runs), "--out", str(out)])
    assert code == 1
    assert one_line(capsys.readouterr().err, f"{out}: cannot be written")
    assert out.read_text() == "old" and sorted(tmp_path.iterdir()) == sorted([out, runs])


@pytest.mark.parametrize("arguments", [["config"], ["models", "list"]])
def test_output_that_cannot_be_written_is_told_in_one_line(arguments: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "agentspec.cli", *arguments],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert one_line(done.stderr, "No space left on device")


def test_names_that_the_terminal_cannot_show_are_escaped(runs: Path) -> None:
    name = os.fsencode(runs.with_name("caf\u00e9")) + b"\xff.jsonl"
    Path(os.fsdecode(name)).write_bytes(runs.read_bytes())
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command: list[Any] = [sys.executable, "-m", "agentspec.cli", "traces", "validate", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"caf\\xe9\\udcff.jsonl: 4 valid runs" in done.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [("--turns", "0"), ("--turns", "-1"), ("--turns", "1.5"), ("--turns", "9" * 5000), ("--turns", ""),
     ("--max-tokens", "0"), ("--top-p", "0"), ("--top-p", "-0.0"), ("--top-p", "1.1"), ("--top-p", "x" * 500),
     ("--temperature", "inf"), ("--temperature", "-1"), ("--temperature", "1e999"), ("--sampling-seed", "one")],
)  # fmt: skip
def test_numbers_out_of_range_name_their_option(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["replay", f"{option}={value}"])
    captured = capsys.readouterr().err
    assert stop.value.code == 2
    assert f"argument {option}: must be " in captured and "x" * 100 not in captured and "9" * 100 not in captured


@pytest.mark.parametrize(
    "url",
    ["", "here", "ftp://here", "http://", "http:///v1", "http://[::1", "http://a b", "http://h:99999", "http://h:x",
     NOWHERE, "http://h\x01", "http://" + "a" * 70_000],
)  # fmt: skip
def test_addresses_that_are_none_or_lead_nowhere(capsys: pytest.CaptureFixture[str], runs: Path, url: str) -> None:
    assert cli.main(["replay", str(runs), f"--url={url}"]) == 1
    captured = capsys.readouterr().err
    assert one_line(captured) and len(captured) < 500


@pytest.mark.parametrize("key", ["a\nb", "caf\u00e9", "\udcff"])
def test_keys_that_no_header_can_carry(capsys: pytest.CaptureFixture[str], runs: Path, key: str) -> None:
    assert cli.main(["replay", str(runs), "--url", NOWHERE, "--api-key", key]) == 1
    assert capsys.readouterr().err == "agentspec: --api-key must be printable ASCII\n"


@pytest.mark.parametrize("name", ["", "nobody", "a" * 300, "a/b/c", "../..", "/dev/null", "caf\u00e9", "\x1b[31m"])
@pytest.mark.parametrize("command", [["serve", "--port", "0", "--model"], ["models", "pull"], ["models", "path"]])
def test_models_that_there_are_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, command: list[str]
) -> None:
    assert cli.main([*command, name, "--home", str(tmp_path / "home")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "\x1b" not in captured.err and one_line(captured.err)


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["models", "pull", "smollm2-135m"], ["models", "list"],
                                     ["models", "path", "smollm2-135m"]])  # fmt: skip
@pytest.mark.parametrize("home", ["file", "file/below", "x" * 300, "/proc/here"])
def test_a_home_that_cannot_be_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, home: str, command: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    code = cli.main([*command, "--home", str(tmp_path / home)])
    captured = capsys.readouterr().err
    assert (code, captured) == (0, "") if code == 0 else one_line(captured)
    assert code == 1 or command == ["models", "list"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["replay"], ["parity"], ["bench", "cost"]])
def test_a_device_that_is_absent_is_told_by_its_flag_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert cli.main([*command, "--model", "no-such-model", "--device", "cuda:1"]) == 2
    assert capsys.readouterr().err == "agentspec: --device is 'cuda:1': torch sees no GPU\n"
    assert cli.main([*command, "--model", "no-such-model", "--dtype", "float16"]) == 2
    said = "agentspec: --dtype is float16: that needs a GPU, and AGENTSPEC_ENGINE_DEVICE leads to the CPU\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("command", [["bench", "int8"], ["parity"], ["replay"]])
def test_files_are_read_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    missing = tmp_path / "missing.jsonl"
    assert cli.main([*command, "--model", "no-such-model", str(missing)]) == 1
    assert capsys.readouterr().err == f"agentspec: {missing}: cannot be read: No such file or directory\n"


def test_a_taken_port_is_told_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("AGENTSPEC_SERVER_PORT", str(port))
        assert cli.main(["serve", "--model", "no-such-model"]) == 2
    assert one_line(capsys.readouterr().err, f"AGENTSPEC_SERVER_PORT: port {port} on 127.0.0.1 is in use")


@pytest.mark.parametrize(
    "command", [[], *([name] for name in ("serve", "replay", "parity", "traces", "models", "bench"))]
)
def test_help_says_what_a_command_does_and_fits_its_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    text = capsys.readouterr().out
    usage, description, *_ = text.split("\n\n")
    assert usage.startswith("usage: agentspec") and len(description) > 50
    assert max(len(line) for line in text.splitlines()) <= 80


def test_help_of_model_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(kind in text for kind in ("a folder with safetensors", "a GGUF file", "a hub id"))
