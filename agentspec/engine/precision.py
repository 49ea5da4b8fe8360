"""`agentspec bench int8`: what numbers of 8 bits gain on this machine, and what they cost in perplexity."""

import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from agentspec.config import Config, Dtype
from agentspec.engine.attention import Segment
from agentspec.engine.chat import Chat
from agentspec.engine.cores import usable_cores
from agentspec.engine.kv import PageTable
from agentspec.engine.models import ensure
from agentspec.engine.profile import filled_table, pass_seconds
from agentspec.engine.target import Target
from agentspec.engine.wheels import Progress
from agentspec.errors import ModelError

CONTEXT = 1024
"""Cached tokens of the measured steps, tokens of the measured prompt, and most tokens of a piece of text; less where
the model's window is shorter."""

NODES = (1, 8, 16)

KEPT = 64
"""Rows of a pass whose logits are kept at a time."""

Render = Callable[[Chat], Sequence[Sequence[int]]]
"""Makes the token ids of the conversations that perplexity is measured on."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of computing the model."""

    weight_bytes: int
    step_ms: tuple[float, ...]
    """Median milliseconds of a step by `NODES`."""

    prefill_tokens_per_s: float
    perplexity: float
    """Exponential of the mean negative log-likelihood of a token, in nats."""


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """Both ways side by side. Ratios are medians over rounds, in each of which both were measured in turns."""

    model: str
    device: str
    threads: int
    rounds: int
    context: int
    nodes: tuple[int, ...]
    float32: Measured
    int8: Measured
    step_ratio: tuple[float, ...]
    """Time of a step in int8 over that in float32, by nodes."""

    int8_over_one: tuple[float, ...]
    """Time of a step in int8 over that of a step of one node, by nodes."""

    prefill_ratio: float
    """Speed of prefill in int8 over that in float32."""

    perplexity_increase: float
    """Share by which the perplexity in int8 is higher."""

    perplexity_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round of one way of computing."""

    steps: tuple[float, ...]
    prefill: float


@torch.inference_mode()
def prefill_seconds(target: Target, tokens: Sequence[int], chunk: int) -> float:
    """Seconds of the passes that compute a prompt, in chunks, with the logits of its last token."""
    table = PageTable(target.shape)
    start = perf_counter()
    for first in range(0, len(tokens), chunk):
        part = tuple(tokens[first : first + chunk])
        keep = [len(part) - 1] if first + len(part) == len(tokens) else []
        target.forward([Segment(table, part, tuple(range(len(part))), None)], keep)
        table.commit(range(len(part)))
    return perf_counter() - start


@torch.inference_mode()
def negative_log_likelihood(target: Target, tokens: Sequence[int]) -> float:
    """Nats of all tokens but the first, each given those before it."""
    table = PageTable(target.shape)
    total = 0.0
    for first in range(0, len(tokens) - 1, KEPT):
        part = tuple(tokens[first : min(first + KEPT, len(tokens) - 1)])
        logits = target.forward([Segment(table, part, tuple(range(len(part))), None)], range(len(part)))
        table.commit(range(len(part)))
        following = torch.tensor(tokens[first + 1 : first + 1 + len(part)])
        total += float(torch.nn.functional.cross_entropy(logits.double(), following, reduction="sum"))
    return total


def pieces(conversations: Sequence[Sequence[int]], tokens: int, longest: int) -> Iterator[Sequence[int]]:
    """Pieces of 2 to `longest` tokens, as many of every conversation as make about `tokens` together."""
    share = max(2, tokens // max(1, len(conversations)))
    for conversation in conversations:
        taken = conversation[:share]
        for first in range(0, len(taken) - 1, longest):
            yield taken[first : first + longest]


def one_round(target: Target, table: PageTable, prompt: Sequence[int], chunk: int) -> Round:
    """Every measured pass once."""
    steps = tuple(pass_seconds(target, table, nodes, 1)[0] for nodes in NODES)
    return Round(steps, prefill_seconds(target, prompt, chunk))


def speeds(targets: Sequence[Target], context: int, rounds: int, chunk: int) -> list[list[Round]]:
    """Rounds by target, the targets in turns; a first round that warms them up is left out."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(targets[0].vocabulary, (context,), generator=generator).tolist()
    tables = [filled_table(target, context) for target in targets]
    made = [
        [one_round(target, table, prompt, chunk) for target, table in zip(targets, tables, strict=True)]
        for _ in range(rounds + 1)
    ]
    return [[row[at] for row in made[1:]] for at in range(len(targets))]


def measured(target: Target, context: int, rounds: Sequence[Round], perplexity: float) -> Measured:
    """Medians of one way of computing."""
    decoder = target.decoder
    assert decoder is not None
    return Measured(
        weight_bytes=decoder.weight_bytes,
        step_ms=tuple(round(median(one.steps[i] for one in rounds) * 1e3, 2) for i in range(len(NODES))),
        prefill_tokens_per_s=round(context / median(one.prefill for one in rounds), 1),
        perplexity=round(perplexity, 4),
    )


def measure(config: Config, render: Render, *, tokens: int, rounds: int, progress: Progress) -> PrecisionReport:
    """Measures the configured model in both ways; `tokens` is about how many its perplexity is of.

    Raises `ModelError` where this machine or the model has no 8-bit numbers, or for texts of no token.
    """
    threads = config.model.threads or usable_cores()
    torch.set_num_threads(threads)
    folder = ensure(config.model.name, config.model.home, progress=progress)
    exact, rounded = (Target.load(folder, dtype) for dtype in (Dtype.FLOAT32, Dtype.INT8))
    if rounded.dtype != Dtype.INT8:
        raise ModelError("there is nothing to compare: this model has no 8-bit numbers on this machine")
    context = min(CONTEXT, exact.window - max(NODES))
    if context < 1:
        raise ModelError(f"the model's window of {exact.window} tokens is too short to measure steps in it")
    texts = list(pieces(render(Chat.load(folder)), tokens, context))
    count = sum(len(text) - 1 for text in texts)
    if not count:
        raise ModelError("the texts have no tokens to predict")
    plain, small = speeds((exact, rounded), context, rounds, config.engine.prefill_chunk)
    nats = [0.0, 0.0]
    for done, text in enumerate(texts):
        progress("perplexity", done, len(texts))
        for at, target in enumerate((exact, rounded)):
            nats[at] += negative_log_likelihood(target, text)
    progress("perplexity", len(texts), len(texts))
    pairs = list(zip(plain, small, strict=True))
    columns = range(len(NODES))
    return PrecisionReport(
        model=Path(config.model.name).name,
        device=f"{platform.machine()} CPU, torch {torch.__version__}",
        threads=threads,
        rounds=rounds,
        context=context,
        nodes=NODES,
        float32=measured(exact, context, plain, math.exp(nats[0] / count)),
        int8=measured(rounded, context, small, math.exp(nats[1] / count)),
        step_ratio=tuple(round(median(b.steps[i] / a.steps[i] for a, b in pairs), 3) for i in columns),
        int8_over_one=tuple(round(median(b.steps[i] / b.steps[0] for _, b in pairs), 3) for i in columns),
        prefill_ratio=round(median(a.prefill / b.prefill for a, b in pairs), 3),
        perplexity_increase=round(math.exp((nats[1] - nats[0]) / count) - 1, 5),
        perplexity_tokens=count,
    )


def print_report(report: PrecisionReport, as_json: bool) -> None:
    """One JSON object, or a table for people."""
    if as_json:
        print(json.dumps(asdict(report)))
        return
    table = Table(title=f"{report.model}, context {report.context}, {report.device}, {report.threads} threads")
    table.add_column("")
    for name in ("float32", "int8", "int8 / float32"):
        table.add_column(name, justify="right")
    plain, small = report.float32, report.int8
    for at, nodes in enumerate(report.nodes):
        of_one = "" if at == 0 else f" ({report.int8_over_one[at]:.2f} of 1)"
        table.add_row(
            f"step of {nodes}, ms", f"{plain.step_ms[at]:.1f}", f"{small.step_ms[at]:.1f}{of_one}",
            f"{report.step_ratio[at]:.2f}",
        )  # fmt: skip
    table.add_row(
        "prefill, tokens/s", f"{plain.prefill_tokens_per_s:.0f}", f"{small.prefill_tokens_per_s:.0f}",
        f"{report.prefill_ratio:.2f}",
    )  # fmt: skip
    table.add_row(
        f"perplexity, {report.perplexity_tokens} tokens", f"{plain.perplexity:.3f}", f"{small.perplexity:.3f}",
        f"{report.perplexity_increase:+.2%}",
    )  # fmt: skip
    share = small.weight_bytes / plain.weight_bytes
    table.add_row("weights, MB", f"{plain.weight_bytes / 1e6:.0f}", f"{small.weight_bytes / 1e6:.0f}", f"{share:.2f}")
    Console().print(table)
