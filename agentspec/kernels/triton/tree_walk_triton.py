"""The kernels of the walk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton.batch import TreeBatch
from agentspec.kernels.triton.tree_walk import HEAD, width_of

COLUMNS = 4096
"""Scores that a program reads at a time."""


@triton.jit
def best_token(scores, vocabulary, COLUMNS: tl.constexpr):
    """The lowest id of the highest score of a row."""
    best = float("-inf")
    chosen = 0
    for begin in range(0, vocabulary, COLUMNS):
        ids = begin + tl.arange(0, COLUMNS)
        values = tl.load(scores + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        highest = tl.max(values, 0)
        lowest_id = tl.min(tl.where(values == highest, ids, 2147483647), 0)
        chosen = tl.where(highest > best, lowest_id, chosen)
        best = tl.maximum(best, highest)
    return chosen


@triton.jit
def drawn_token(scores, vocabulary, uniform, COLUMNS: tl.constexpr):
    """The first id with which the weights' sum exceeds its share, else the last that has a weight."""
    total = tl.full([], 0.0, tl.float64)
    for begin in range(0, vocabulary, COLUMNS):
        ids = begin + tl.arange(0, COLUMNS)
        weights = tl.load(scores + ids, mask=ids < vocabulary, other=0.0).to(tl.float64)
        total = tl.max(total + tl.cumsum(weights, 0), 0)
    threshold = uniform * total
    total = tl.full([], 0.0, tl.float64)
    chosen = 2147483647
    last = 0
    for begin in range(0, vocabulary, COLUMNS):
        ids = begin + tl.arange(0, COLUMNS)
        weights = tl.load(scores + ids, mask=ids < vocabulary, other=0.0).to(tl.float64)
        reached = total + tl.cumsum(weights, 0)
        # A sum may round up where nothing is added: only tokens with a weight count.
        beyond = (reached > threshold) & (weights > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(beyond, ids, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
        total = tl.max(reached, 0)
    return tl.minimum(chosen, last)


@triton.jit
def choose_tokens(scores, uniform, choice, vocabulary, row_stride, DRAWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One row."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * row_stride
    if DRAWS:
        share = tl.load(uniform + row)
        if share >= 0:
            tl.store(choice + row, drawn_token(scores, vocabulary, share, COLUMNS))
        else:
            tl.store(choice + row, best_token(scores, vocabulary, COLUMNS))
    else:
        tl.store(choice + row, best_token(scores, vocabulary, COLUMNS))


@triton.jit(do_not_specialize=["width"])
def walk_tree(
    choice, token, outcome, start, chunk, parent, depth, first_scored, width,
    HEAD: tl.constexpr, NODES: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    """One sequence. A node is visited if it carries its parent's choice and so does every node above it: after n
    doublings `agrees` tells it of the 2^n nodes from a node upwards, and `above` is the node beyond them. Siblings
    carry distinct tokens, so the visited nodes are one line."""
    sequence = tl.program_id(0)
    first = tl.load(start + sequence)
    rows = tl.load(start + sequence + 1) - first
    scored = tl.load(first_scored + sequence)
    outcome += sequence * width
    if rows == 0:
        tl.store(outcome, 0)
        return
    if tl.load(chunk + sequence) != 0:
        tl.store(outcome, rows)
        tl.store(outcome + 1, tl.load(choice + scored))
        return
    node = tl.arange(0, NODES)
    live = node < rows
    above = tl.maximum(tl.load(parent + first + node, mask=live, other=0), 0)
    wanted = tl.load(choice + scored + above, mask=live, other=0)
    carried = tl.load(token + first + node, mask=live, other=0)
    agrees = (live & ((node == 0) | (wanted == carried))).to(tl.int32)
    for _ in range(DOUBLINGS):
        agrees = agrees & tl.gather(agrees, above, 0)
        above = tl.gather(above, above, 0)
    visited = agrees != 0
    last = tl.max(tl.where(visited, node, 0), 0)
    tl.store(outcome, tl.sum(agrees, 0))
    tl.store(outcome + 1, tl.load(choice + scored + last))
    tl.store(outcome + HEAD + tl.load(depth + first + node, mask=live, other=0), node, mask=visited)


def launch_choose(scores: Tensor, uniform: Tensor | None) -> Tensor:
    """`tree_walk.choose`."""
    rows, vocabulary = scores.shape
    choice = torch.empty(rows, dtype=torch.int32, device=scores.device)
    choose_tokens[rows,](
        scores, choice if uniform is None else uniform, choice, vocabulary, scores.stride(0),
        DRAWS=uniform is not None, COLUMNS=min(COLUMNS, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip
    return choice


def launch_walk(choice: Tensor, token: Tensor, batch: TreeBatch) -> Tensor:
    """`tree_walk.walk`."""
    width = HEAD + width_of(batch)
    outcome = torch.full((batch.sequences, width), -1, dtype=torch.int32, device=choice.device)
    nodes = triton.next_power_of_2(max(width_of(batch), 2))
    walk_tree[batch.sequences,](
        choice, token, outcome, batch.start, batch.chunk, batch.parent, batch.depth, batch.first_scored, width,
        HEAD=HEAD, NODES=nodes, DOUBLINGS=nodes.bit_length() - 1, num_warps=1,
    )  # fmt: skip
    return outcome
