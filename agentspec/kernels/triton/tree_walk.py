"""The lossless walk on the device: the target's own choice at every node, and how far they lead through each tree.

With one uniform for each position the coupled rule is exact for greedy and for drawn tokens alike; what the host has to
read of a step is one small tensor (as `engine.verify.walk`, which goes node by node).
"""

from itertools import pairwise

import torch
from torch import Tensor

from agentspec.errors import KernelError
from agentspec.kernels.triton.backend import runs_triton
from agentspec.kernels.triton.batch import MOST_NODES, TreeBatch

HEAD = 2
"""Entries of an outcome before the path: the number of visited nodes, and the token after the last."""


def choose(scores: Tensor, uniform: Tensor | None = None) -> Tensor:
    """(choices) int32: the token after each row.

    scores: (choices, vocabulary). Without uniforms, or where a row's is negative, the highest score's token, the lowest
    id of equal ones. Otherwise scores are weights, none negative, of what may be drawn: the first token with which
    their sum, in the order of ids and in float64, exceeds uniform times the whole sum.
    uniform: (choices) float64, below 1.
    """
    if scores.dim() != 2 or scores.shape[1] < 1 or scores.stride(1) != 1:
        raise KernelError(f"scores must be (choices, vocabulary), ids side by side, got {tuple(scores.shape)}")
    if uniform is not None and (uniform.shape != scores.shape[:1] or uniform.dtype != torch.float64):
        raise KernelError(
            f"uniforms must be {scores.shape[0]} float64 numbers, got {tuple(uniform.shape)} {uniform.dtype}"
        )
    if scores.shape[0] == 0:
        return torch.empty(0, dtype=torch.int32, device=scores.device)
    if not runs_triton(scores):
        return choose_reference(scores, uniform)
    from agentspec.kernels.triton.tree_walk_triton import launch_choose

    return launch_choose(scores, uniform)


def walk(choice: Tensor, token: Tensor, batch: TreeBatch) -> Tensor:
    """(sequences, 2 + width) int32: number of visited nodes, token after the last, visited nodes from the root on.

    choice: (choices) int32, in the order of `batch.scored`; token: (rows) int32. Entries behind a path are -1, as is
    the token of a sequence without rows. A chunk's rows all count as visited; its path is not written: it is the rows.
    """
    if choice.shape != batch.scored.shape or token.shape != batch.owner.shape:
        raise KernelError(
            f"{choice.shape[0]} choices and {token.shape[0]} tokens for {batch.scored.shape[0]} and {batch.rows}"
        )
    if batch.sequences == 0 or not runs_triton(choice):
        return walk_reference(choice, token, batch)
    from agentspec.kernels.triton.tree_walk_triton import launch_walk

    return launch_walk(choice, token, batch)


def width_of(batch: TreeBatch) -> int:
    """Entries that the longest path may take."""
    return min(batch.most_rows, MOST_NODES)


def choose_reference(scores: Tensor, uniform: Tensor | None = None) -> Tensor:
    """`choose`, with sums over the whole vocabulary."""
    best = scores.argmax(-1)
    if uniform is not None:
        cumulative = scores.double().cumsum(-1)
        drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
        ids = torch.arange(scores.shape[1], device=scores.device)
        last = torch.where(scores > 0, ids, 0).amax(-1)
        best = torch.where(uniform < 0, best, torch.minimum(drawn, last))
    return best.to(torch.int32)


def walk_reference(choice: Tensor, token: Tensor, batch: TreeBatch) -> Tensor:
    """`walk`, node by node."""
    choices, tokens, parents = choice.tolist(), token.tolist(), batch.parent.tolist()
    starts, firsts, chunks = batch.start.tolist(), batch.first_scored.tolist(), batch.chunk.tolist()
    outcome = torch.full((batch.sequences, HEAD + width_of(batch)), -1, dtype=torch.int32)
    for sequence, (first, past) in enumerate(pairwise(starts)):
        outcome[sequence, 0] = past - first
        if first == past:
            continue
        mine = choices[firsts[sequence] :]
        if chunks[sequence]:
            outcome[sequence, 1] = mine[0]
            continue
        path = [0]
        for node in range(1, past - first):
            if parents[first + node] == path[-1] and tokens[first + node] == mine[path[-1]]:
                path.append(node)
        outcome[sequence, 0] = len(path)
        outcome[sequence, 1] = mine[path[-1]]
        outcome[sequence, HEAD : HEAD + len(path)] = torch.tensor(path)
    return outcome.to(choice.device)
