"""`agentspec bench cost`: what a step costs by tree nodes and context, beside transformers on the same weights."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from agentspec.config import Config
from agentspec.engine.cores import usable_cores
from agentspec.engine.devices import load_target
from agentspec.engine.loop import StepLoop
from agentspec.engine.models import ensure
from agentspec.engine.offline import complete
from agentspec.engine.profile import filled_table, pass_seconds
from agentspec.engine.target import AnyTarget
from agentspec.engine.wheels import Progress, silent
from agentspec.policies.cost import FixedCost

NODES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 1024, 4096)
PROMPT = 256
"""Prompt tokens of the decoding comparison."""

NEW = 32
"""Tokens that each side generates in one round of it."""


@dataclass(frozen=True, slots=True)
class CostReport:
    """Measured step costs and the decoding comparison, with what they were measured on."""

    model: str
    device: str
    threads: int
    rounds: int
    nodes: tuple[int, ...]
    step_ms: dict[str, list[float]]
    """Median milliseconds by context, one per entry of `nodes`."""

    ratio: dict[str, list[float]]
    """Median over rounds of a step's time over the one-node step's of the same round."""

    decode_tokens_per_s: float
    """Engine with speculation off, 256 prompt tokens, 32 new ones."""

    transformers_tokens_per_s: float
    decode_ratio: float
    """Median over rounds; both sides alternate inside each."""


def step_costs(target: AnyTarget, contexts: Sequence[int], rounds: int) -> dict[int, list[list[float]]]:
    """Seconds by context: one list per round, one entry per node count, node counts in turns."""
    table = {}
    for context in contexts:
        cached = filled_table(target, context)
        pass_seconds(target, cached, max(NODES), 1)
        table[context] = [[pass_seconds(target, cached, nodes, 1)[0] for nodes in NODES] for _ in range(rounds)]
    return table


def decode_comparison(folder: Path, target: AnyTarget, config: Config, rounds: int) -> list[tuple[float, float]]:
    """(our seconds, transformers' seconds) per round for the same greedy decoding, prefill left out on both sides."""
    weights = next(target.model.parameters())
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=weights.dtype, local_files_only=True)
    plain.to(weights.device).eval()
    prompt = torch.randint(100, target.vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    loop = StepLoop(target, config.engine, FixedCost())
    pairs = []
    for _ in range(rounds):
        ours = complete(loop, prompt[0].tolist(), NEW + 1).decode_s
        ids = prompt.to(weights.device)
        one, all_ = transformers_seconds(plain, ids, 1), transformers_seconds(plain, ids, NEW + 1)
        pairs.append((ours, all_ - one))
    return pairs


def transformers_seconds(model: Any, prompt: torch.Tensor, new: int) -> float:
    """Seconds of `generate` for exactly `new` greedy tokens."""
    start = perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
    )
    return perf_counter() - start


def measure(config: Config, rounds: int = 21, progress: Progress = silent) -> CostReport:
    """Run both measurements on the configured model."""
    threads = config.model.threads or usable_cores()
    torch.set_num_threads(threads)
    folder = ensure(config.model.name, config.model.home, progress=progress)
    target = load_target(folder, config)
    contexts = [context for context in CONTEXTS if context + max(NODES) <= target.window]
    costs = step_costs(target, contexts, rounds)
    pairs = decode_comparison(folder, target, config, max(rounds // 2, 3))
    columns = range(len(NODES))
    return CostReport(
        model=Path(config.model.name).name,
        device=f"{computing_unit(target)}, torch {torch.__version__}",
        threads=threads,
        rounds=rounds,
        nodes=NODES,
        step_ms={str(c): [round(median(r[i] for r in costs[c]) * 1e3, 2) for i in columns] for c in contexts},
        ratio={str(c): [round(median(r[i] / r[0] for r in costs[c]), 3) for i in columns] for c in contexts},
        decode_tokens_per_s=round(NEW / median(ours for ours, _ in pairs), 2),
        transformers_tokens_per_s=round(NEW / median(theirs for _, theirs in pairs), 2),
        decode_ratio=round(median(theirs / ours for ours, theirs in pairs), 3),
    )


def computing_unit(target: AnyTarget) -> str:
    """What a target's passes run on."""
    device = next(target.model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def print_report(report: CostReport, as_json: bool) -> None:
    """One JSON object, or tables for people."""
    console = Console()
    if as_json:
        print(json.dumps(asdict(report)))
        return
    table = Table(title=f"{report.model}: milliseconds of a step (times one node), {report.device}")
    table.add_column("nodes", justify="right")
    for context in report.step_ms:
        table.add_column(f"context {context}", justify="right")
    for at, nodes in enumerate(report.nodes):
        cells = [f"{ms[at]:.1f} ({report.ratio[context][at]:.2f})" for context, ms in report.step_ms.items()]
        table.add_row(str(nodes), *cells)
    console.print(table)
    console.print(
        f"decoding without drafts: {report.decode_tokens_per_s} tokens/s, transformers generate on the same weights "
        f"{report.transformers_tokens_per_s} tokens/s: {report.decode_ratio} times as fast"
    )


def run_cost_bench(config: Config, *, as_json: bool, rounds: int = 21, progress: Progress = silent) -> None:
    """Measure and print. Nothing else should run on the machine meanwhile."""
    print_report(measure(config, rounds, progress), as_json)
