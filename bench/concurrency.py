"""What serving several clients at once costs and gains, against serving them one after the other.

    python -m bench.concurrency [--clients 4] [--turns 3] [--tokens 64] [traces.jsonl ...]

Each client replays its own recorded run over HTTP, streaming and greedy. Every arm starts with an empty engine: the
clients one by one, then all at once, with speculation off and on. All four arms must generate the same tokens. Prints
a table; the last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import httpx
import torch

from agentspec.cache.draft import compile_kernels
from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig, Config, ModelConfig, ServerConfig, load
from agentspec.engine.cores import usable_cores
from agentspec.engine.models import ensure
from agentspec.engine.service import Engine
from agentspec.server.run import serve_in_thread
from agentspec.traces.files import read_traces
from agentspec.traces.schema import Trace, Turn

RECORDED = Path(__file__).resolve().parents[1] / "traces" / "recorded"


@dataclass(frozen=True, slots=True)
class Arm:
    """How one way of serving the same requests went."""

    speculation: bool
    at_once: bool
    tokens: int
    seconds: float
    generated: list[list[list[int]]]
    """Token ids by client and turn."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def body_of(turn: Turn, tokens: int, speculation: bool) -> dict[str, Any]:
    """The request of a recorded turn."""
    return {
        "messages": list(turn.prompt),
        "tools": list(turn.trace.tools or ()),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "speculation": {"enabled": speculation, "report": True},
    }


async def streamed(client: httpx.AsyncClient, trace: Trace, body: dict[str, Any]) -> list[int]:
    """Token ids of one streamed answer."""
    ids: list[int] | None = None
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, headers={"X-AgentSpec-Trajectory": trace.id}
    ) as response:
        if response.status_code != 200:
            raise SystemExit(f"{trace.id}: {response.status_code} {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                ids = json.loads(line.removeprefix("data: ")).get("agentspec", {}).get("token_ids", ids)
    if ids is None:
        raise SystemExit(f"{trace.id}: the stream ended without a report")
    return ids


async def replayed(client: httpx.AsyncClient, trace: Trace, options: argparse.Namespace, on: bool) -> list[list[int]]:
    """One client: the turns of its run in order."""
    turns = list(trace.turns())[: options.turns]
    return [await streamed(client, trace, body_of(turn, options.tokens, on)) for turn in turns]


async def clients(
    url: str, traces: Sequence[Trace], options: argparse.Namespace, on: bool, at_once: bool
) -> list[list[list[int]]]:
    """All clients, at once or one after the other."""
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        if at_once:
            return await asyncio.gather(*(replayed(client, trace, options, on) for trace in traces))
        return [await replayed(client, trace, options, on) for trace in traces]


def arm(
    config: Config, folder: Path, traces: Sequence[Trace], options: argparse.Namespace, on: bool, at_once: bool
) -> Arm:
    """Serve a fresh engine and measure."""
    engine = Engine.from_folder(config, folder, Histories(CacheConfig()))
    with serve_in_thread(engine, ServerConfig()) as url:
        start = time.perf_counter()
        generated = asyncio.run(clients(url, traces, options, on, at_once))
        seconds = time.perf_counter() - start
    tokens = sum(len(turn) for run in generated for turn in run)
    made = Arm(on, at_once, tokens, seconds, generated)
    print(f"{'on' if on else 'off':11} {'at once' if at_once else 'one by one':10} {tokens:7d} {seconds:8.1f} "
          f"{made.tokens_per_second:9.1f}", flush=True)  # fmt: skip
    return made


def summary(arms: Sequence[Arm], options: argparse.Namespace) -> dict[str, Any]:
    """What the arms say together."""
    speed = {(one.speculation, one.at_once): one.tokens_per_second for one in arms}
    return {
        "model": options.model,
        "clients": options.clients,
        "turns": options.turns,
        "same_tokens": all(one.generated == arms[0].generated for one in arms),
        "ratio_off": round(speed[False, True] / speed[False, False], 3),
        "ratio_on": round(speed[True, True] / speed[True, False], 3),
        "arms": [{name: value for name, value in asdict(one).items() if name != "generated"} for one in arms],
    }


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("files", nargs="*", type=Path, help="trace files; those shipped by default")
    made.add_argument("--model", default=ModelConfig().name)
    made.add_argument("--clients", type=int, default=4)
    made.add_argument("--turns", type=int, default=3, help="turns of each client")
    made.add_argument("--tokens", type=int, default=64, help="most tokens of a turn")
    return made


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All four arms."""
    config = load()
    config = replace(config, model=replace(config.model, name=options.model))
    torch.set_num_threads(config.model.threads or usable_cores())
    folder = ensure(options.model, config.model.home)
    compile_kernels()
    traces = list(read_traces(options.files or sorted(RECORDED.glob("*.jsonl"))))[: options.clients]
    print(f"{'speculation':11} {'clients':10} {'tokens':>7} {'seconds':>8} {'tokens/s':>9}")
    arms = [arm(config, folder, traces, options, on, at_once) for on in (False, True) for at_once in (False, True)]
    return summary(arms, options)


def main() -> None:
    """Measure and print."""
    print(json.dumps(run(parser().parse_args())))


if __name__ == "__main__":
    main()
