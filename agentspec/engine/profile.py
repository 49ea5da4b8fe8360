"""Measuring what a pass costs on this device, once for each model and way of computing it."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from agentspec.compiled import digest
from agentspec.engine.attention import Segment
from agentspec.engine.kv import PageTable
from agentspec.engine.target import AnyTarget
from agentspec.kernels.cpu import attend
from agentspec.policies.cost import CostTable

log = logging.getLogger(__name__)

ROWS = (1, 4, 8, 16, 32)
LONGEST = 2048
"""Tokens of the longest context that start-up measures; the other is an eighth of it."""


@torch.inference_mode()
def filled_table(target: AnyTarget, context: int) -> PageTable:
    """A sequence with `context` committed positions of zeros: as costly as real ones."""
    table = PageTable(target.shape)
    table.reserve(context + 64)
    for page in table.pages:
        page.k.zero_()
        page.v.zero_()
    table.length = context
    return table


def tree_parents(nodes: int) -> tuple[int, ...]:
    """A tree of `nodes` nodes, a spine with a twig at every other node: the usual shape of retrieved drafts."""
    return tuple(-1 if node == 0 else node - 1 if node % 3 else max(node - 2, 0) for node in range(nodes))


def pass_seconds(target: AnyTarget, table: PageTable, nodes: int, repeats: int) -> list[float]:
    """Wall seconds of `repeats` passes over a tree of `nodes` nodes behind the sequence's context, logits included."""
    parents = tree_parents(nodes)
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    segment = Segment(table, tuple(range(1, nodes + 1)), tuple(depths), parents)
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        float(target.forward([segment], range(nodes))[-1, -1])  # a number on the host: a GPU has finished
        seconds.append(perf_counter() - start)
    return seconds


def cost_table(target: AnyTarget, rounds: int = 3) -> CostTable:
    """Milliseconds by context and row count; also warms the model up."""
    longest = min(LONGEST, target.window - ROWS[-1])
    return CostTable.measured({context: row_costs(target, context, rounds) for context in (longest // 8, longest)})


def stored_cost_table(
    target: AnyTarget, file: Path, measure: Callable[[AnyTarget], CostTable] = cost_table
) -> CostTable:
    """The cost table that an earlier start of the same target on the same device left in `file`; else a new one, which
    is left there. A file that cannot be read or written costs the measurement, nothing else."""
    device = device_of(target)
    table = read_table(file, device)
    if table is not None:
        warm_up(target)
        return table
    log.info("computing the first passes and measuring what they cost, once for this model")
    table = measure(target)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".new")
        unfinished.write_text(json.dumps({"device": device, "table": asdict(table)}), encoding="utf-8")
        unfinished.replace(file)
    except OSError as error:
        log.warning("what passes cost is measured again at the next start: %s", error)
    return table


def device_of(target: AnyTarget) -> dict[str, Any]:
    """What the cost of a pass depends on: the device, the model's extents, the code that computes it."""
    config: Any = target.model.config
    return {
        "code": digest(Path(attend.__file__).parent),
        **target.facts,
        "hidden": config.hidden_size,
        "inner": getattr(config, "intermediate_size", None),
        "layers": target.shape.layers,
        "page_bytes": target.shape.page_bytes,
        "vocabulary": target.vocabulary,
        "rows": list(ROWS),
    }


def read_table(file: Path, device: dict[str, Any]) -> CostTable | None:
    """The table of a file; None where there is none, or none for this device."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["device"] != device:
            return None
        table = content["table"]
        samples = {
            int(context): {int(count): float(ms) for count, ms in zip(table["rows"], row, strict=True)}
            for context, row in zip(table["contexts"], table["milliseconds"], strict=True)
        }
        whole = len(samples) >= 2 and len(table["rows"]) >= 2
        sane = all(0 < ms < math.inf for row in samples.values() for ms in row.values())
        return CostTable.measured(samples) if whole and sane else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def warm_up(target: AnyTarget) -> None:
    """A pass of one row and one of many, so that no request pays for what the first ones do."""
    cached = filled_table(target, 1)
    for count in (1, ROWS[-1]):
        pass_seconds(target, cached, count, 1)


def row_costs(target: AnyTarget, context: int, rounds: int) -> dict[int, float]:
    """Milliseconds by row count at one context.

    The counts are measured in turns, and the quickest pass of each counts: other load only makes passes slower.
    """
    cached = filled_table(target, context)
    pass_seconds(target, cached, ROWS[-1], 1)
    table = [[pass_seconds(target, cached, count, 1)[0] for count in ROWS] for _ in range(rounds)]
    return {count: min(seconds[i] for seconds in table) * 1e3 for i, count in enumerate(ROWS)}
