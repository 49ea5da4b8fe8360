"""The command line: output, exit codes, errors in one line."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentspec import __version__, cli
from agentspec.commands.settings import all_settings, shown

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AGENTSPEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def record(identifier: str, turns: int = 2) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return {"id": identifier, "source": "demo", "domain": "swe", "messages": messages}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(record(f"run/{at}")) + "\n" for at in range(4)))
    return path


class Handler(BaseHTTPRequestHandler):
    """A server of one model that says nine tokens."""

    fails = False

    def do_GET(self) -> None:
        self.reply("application/json", json.dumps({"data": [{"id": "served"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        report = {"steps": 3, "decode_s": 0.1 if body["speculation"]["enabled"] else 0.2, "token_ids": [1, 2, 3]}
        finish: dict[str, Any] = {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}
        last = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}, "agentspec": report}
        events = [json.dumps(finish), json.dumps(last), *([] if type(self).fails else ["[DONE]"])]
        self.reply("text/event-stream", "".join(f"data: {data}\n\n" for data in events).encode())

    def reply(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class FailingHandler(Handler):
    fails = True


def started(handler: type[Handler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def url() -> Iterator[str]:
    yield from started(Handler)


@pytest.fixture
def failing_url() -> Iterator[str]:
    yield from started(FailingHandler)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_and_light_commands_import_nothing_heavy(runs: Path) -> None:
    code = (
        "import sys; from agentspec import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"assert cli.main(['config']) == 0 and cli.main(['traces', 'validate', {str(runs)!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'httpx', 'starlette', 'redis', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "usage: agentspec" in done.stdout


def test_models_list_does_not_import_torch() -> None:
    code = "import sys; from agentspec import cli; cli.main(['models', 'list']); assert 'torch' not in sys.modules"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "smollm2-135m" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"agentspec {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["models"], ["replay", "--clients", "0"], ["replay", "--top-p", "2"], ["replay", "--turns", "x"],
     ["replay", "--temperature", "nan"], ["replay", "--baseline", "--no-speculation"], ["traces", "import", "x"]],
)  # fmt: skip
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_config_shows_every_setting_with_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTSPEC_SERVER_PORT", "9001")
    assert cli.main(["config"]) == 0
    text = capsys.readouterr().out
    assert "server.port = 9001  (default 8000)" in text
    assert "AGENTSPEC_ENGINE_PREFILL_CHUNK: Prompt tokens computed in one step" in text
    assert all(setting.variable in text for setting in all_settings())


def test_config_as_json_hides_passwords(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSPEC_CACHE_REDIS_URL", "redis://user:secret@host:6379/0")
    assert cli.main(["config", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["AGENTSPEC_CACHE_REDIS_URL"] == "redis://user:***@host:6379/0"
    assert values["AGENTSPEC_SERVER_PORT"] == 8000


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://:secret@h/0", "redis://:***@h/0"),
        ("redis://h:1/0", "redis://h:1/0"),
        ("rediss://u:p:q@h/0", "rediss://u:***@h/0"),
    ],
)
def test_shown_url(url: str, text: str) -> None:
    assert shown(url) == text


def test_wrong_setting_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTSPEC_SERVER_PORT", "many")
    assert cli.main(["config"]) == 2
    assert capsys.readouterr().err == "agentspec: AGENTSPEC_SERVER_PORT must be a whole number, got 'many'\n"


def test_a_dtype_that_there_is_not_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTSPEC_MODEL_DTYPE", "float64")
    assert cli.main(["serve"]) == 2
    known = "float32 or float16 or bfloat16 or int8"
    assert capsys.readouterr().err == f"agentspec: AGENTSPEC_MODEL_DTYPE must be {known}, got 'float64'\n"


def test_a_device_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--device", "tpu"]) == 2
    assert capsys.readouterr().err == "agentspec: --device must be auto or cpu or cuda or cuda:N, got 'tpu'\n"


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("AGENTSPEC_MODEL_THREADS", "1025", "0 to 1024"),
        ("AGENTSPEC_ENGINE_MAX_RUNNING", "0", f"1 to {2**53}"),
        ("AGENTSPEC_ENGINE_MAX_QUEUE", "0", f"1 to {2**53}"),
        ("AGENTSPEC_ENGINE_PREFILL_CHUNK", "0", f"1 to {2**53}"),
        ("AGENTSPEC_ENGINE_KV_BYTES", "0", f"1 to {2**53}"),
        ("AGENTSPEC_CACHE_DEADLINE_MS", "9" * 400, f"0 to {2**53}"),
        ("AGENTSPEC_CACHE_TTL_S", "0", f"1 to {2**31 - 1}"),
        ("AGENTSPEC_SERVER_PORT", "99999", "0 to 65535"),
        ("AGENTSPEC_SERVER_MAX_BODY_BYTES", "0", f"1 to {2**53}"),
        ("AGENTSPEC_SERVER_KEEPALIVE_S", "nan", f"0 to {2**53}"),
        ("AGENTSPEC_SERVER_KEEPALIVE_S", "inf", f"0 to {2**53}"),
    ],
)
def test_a_number_out_of_bounds_is_named_with_its_bounds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert cli.main(["serve"]) == 2
    assert capsys.readouterr().err == f"agentspec: {variable} must be {allowed}, got {value:.60}\n"


def test_a_flag_out_of_bounds_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--max-running", "0"]) == 2
    assert capsys.readouterr().err == f"agentspec: --max-running must be 1 to {2**53}, got 0\n"


def test_a_wrong_store_is_named_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTSPEC_CACHE_REDIS_URL", "junk")
    assert cli.main(["serve", "--model", "no-such-model", "--port", "0"]) == 2
    assert "AGENTSPEC_CACHE_REDIS_URL must be a Redis URL, got 'junk'" in capsys.readouterr().err


def test_wrong_flag_value_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "many"]) == 2
    assert capsys.readouterr().err == "agentspec: --port must be a whole number, got 'many'\n"


def test_unknown_model_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model", "smollm", "--port", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("agentspec: unknown model 'smollm'") and captured.err.count("\n") == 1


def test_models_list_says_what_is_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["models", "list", "--home", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    assert [line.split()[-1] for line in lines] == ["here", "no", "no", "no"]


def test_models_path_of_a_folder_and_of_a_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert cli.main(["models", "path", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert cli.main(["models", "pull", str(tmp_path), "--home", str(tmp_path / "home")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert cli.main(["models", "path", "smollm2-135m", "--home", str(tmp_path)]) == 1
    assert "run: agentspec models pull smollm2-135m" in capsys.readouterr().err
    assert cli.main(["models", "path", "smollm", "--home", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("agentspec: unknown model 'smollm' (did you mean")


def test_traces_validate_names_the_wrong_line(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    assert cli.main(["traces", "validate", str(runs)]) == 0
    assert capsys.readouterr().out == f"{runs}: 4 valid runs\n"
    with runs.open("a") as file:
        file.write("{}\n")
    assert cli.main(["traces", "validate", str(runs)]) == 1
    assert capsys.readouterr().err == f"agentspec: {runs}:5: id must be a string that is not empty, got None\n"


def test_traces_validate_checks_ids_over_all_files(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    copy = runs.with_name("copy.jsonl")
    shutil.copy(runs, copy)
    assert cli.main(["traces", "validate", str(runs), str(copy)]) == 1
    assert f"{copy}:1: the id 'run/0' was used before" in capsys.readouterr().err


def test_traces_import_and_stats(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    options = ["--out", str(out), "--first-turns", "1", "--limit", "3", "--seed", "5"]
    assert cli.main(["traces", "import", str(runs), *options]) == 0
    assert capsys.readouterr().err == f"{out}: 3 of 4 runs, 0 repaired, 0 refused\n"
    assert cli.main(["traces", "stats", "--json", str(out)]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["trajectories"], counts["turns"], counts["domains"]) == (3, 3, {"swe": 3})
    assert cli.main(["traces", "stats", str(out), str(runs)]) == 1
    assert cli.main(["traces", "stats", str(runs)]) == 0
    assert "swe 4" in capsys.readouterr().out


def test_replay_prints_exactly_one_json_object(capsys: pytest.CaptureFixture[str], runs: Path, url: str) -> None:
    options = ["--baseline", "--json", "--trajectories", "3", "--turns", "1", "--api-key", "sesame"]
    assert cli.main(["replay", str(runs), "--url", url, *options]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.out.count("\n") == 1 and captured.err == ""
    assert (report["turns"], report["tokens"], report["steps"], report["speed_ratio"]) == (3, 27, 9, 2.0)
    assert (report["identical_turns"], report["model"], len(report["per_trajectory"])) == (3, "served", 3)
    assert report["command"] == f"agentspec replay {runs} --url {url} {' '.join(options[:-1])} '***'"


def test_replay_prints_a_table(capsys: pytest.CaptureFixture[str], runs: Path, url: str) -> None:
    assert cli.main(["replay", str(runs), "--url", f"{url}/v1", "--clients", "2"]) == 0
    text = capsys.readouterr().out
    assert "Replay on served" in text and "run/3" in text and "total" in text


def test_replay_draws_the_same_runs_for_the_same_seed(capsys: pytest.CaptureFixture[str], runs: Path, url: str) -> None:
    def drawn(seed: int) -> tuple[str, ...]:
        options = ["--url", url, "--json", "--trajectories", "2", "--turns", "1", "--seed", str(seed)]
        assert cli.main(["replay", str(runs), *options]) == 0
        return tuple(row["id"] for row in json.loads(capsys.readouterr().out)["per_trajectory"])

    draws = [drawn(seed) for seed in range(6)]
    assert drawn(0) == draws[0]
    assert len(set(draws)) > 1
    assert all(draw == tuple(sorted(draw)) for draw in draws)


def test_api_20_replay_of_a_cut_stream_fails_in_one_line(
    capsys: pytest.CaptureFixture[str], runs: Path, failing_url: str
) -> None:
    assert cli.main(["replay", str(runs), "--url", failing_url, "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    reason = "the stream ended without [DONE]; the answer is not complete"
    assert captured.err == f"agentspec: run/0, messages[1]: {reason}\n"


def test_replay_simulates_with_a_tokenizer_alone(
    capsys: pytest.CaptureFixture[str], runs: Path, tiny_model: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    assert cli.main(["replay", str(runs), "--simulate", "--model", str(tmp_path), "--json", "--api-key", "sesame"]) == 0
    report = json.loads(capsys.readouterr().out)
    total = report["all"]["all"]
    assert total["arms"]["none"]["8"]["tokens_per_step"] == 1
    assert total["arms"]["hybrid"]["64"]["tokens_per_step"] > total["arms"]["local"]["8"]["tokens_per_step"] > 1
    assert report["settings"]["budgets"] == [8, 16, 32, 64]
    assert "sesame" not in report["command"]
    assert cli.main(["replay", str(runs), "--simulate", "--model", str(tmp_path)]) == 0
    assert "Tokens per step (a pass of the model)" in capsys.readouterr().out


def test_replay_without_traces_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert cli.main(["replay", str(tmp_path / "empty.jsonl"), "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "agentspec: the files hold no trace\n"


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", interrupted)
    assert cli.main(["traces", "validate", str(runs)]) == 130


def test_closed_pipe_is_silent(runs: Path) -> None:
    command = f"{sys.executable} -m agentspec.cli config | true; echo ${{PIPESTATUS[0]}}"
    for _ in range(2):
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        assert done.stdout.strip() in ("0", "141")
