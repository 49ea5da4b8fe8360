"""Measuring what a pass costs on this device."""

from time import perf_counter

import torch

from agentspec.engine.attention import Segment
from agentspec.engine.kv import PageTable
from agentspec.engine.target import Target
from agentspec.policies.cost import CostTable

ROWS = (1, 4, 8, 16, 32)
LONGEST = 2048
"""Tokens of the longest context that start-up measures; the other is an eighth of it."""


@torch.inference_mode()
def filled_table(target: Target, context: int) -> PageTable:
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


def pass_seconds(target: Target, table: PageTable, nodes: int, repeats: int) -> list[float]:
    """Wall seconds of `repeats` passes over a tree of `nodes` nodes behind the sequence's context, logits included."""
    parents = tree_parents(nodes)
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    segment = Segment(table, tuple(range(1, nodes + 1)), tuple(depths), parents)
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        target.forward([segment], range(nodes))
        seconds.append(perf_counter() - start)
    return seconds


def cost_table(target: Target, rounds: int = 3) -> CostTable:
    """Milliseconds by context and row count; also warms the model up."""
    longest = min(LONGEST, target.window - ROWS[-1])
    return CostTable.measured({context: row_costs(target, context, rounds) for context in (longest // 8, longest)})


def row_costs(target: Target, context: int, rounds: int) -> dict[int, float]:
    """Milliseconds by row count at one context.

    The counts are measured in turns, and the quickest pass of each counts: other load only makes passes slower.
    """
    cached = filled_table(target, context)
    pass_seconds(target, cached, ROWS[-1], 1)
    table = [[pass_seconds(target, cached, count, 1)[0] for count in ROWS] for _ in range(rounds)]
    return {count: min(seconds[i] for seconds in table) * 1e3 for i, count in enumerate(ROWS)}
