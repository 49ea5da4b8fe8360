"""The target's choices made on a device, as `engine.sampling` makes them on the host, and the walk that they lead to.

The filters are written again over all rows of a sequence, without a step that waits for the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.engine.attention import Segment
from agentspec.engine.device_inputs import is_tree
from agentspec.engine.sampling import keyed_uniform
from agentspec.engine.verify import Draw, Walk
from agentspec.kernels.triton.tree_walk import choose
from agentspec.types import SamplingParams


def weights_of(logits: Tensor, params: SamplingParams) -> Tensor:
    """(rows, vocabulary) float64: unnormalised probabilities of what may be drawn after each row, else 0; as
    `sampling.allowed`. The temperature is above 0."""
    exact = logits.double()
    probabilities = torch.softmax((exact - exact.amax(-1, keepdim=True)) / params.temperature, -1)
    weights = probabilities
    if params.top_k or params.top_p < 1:
        weights = nucleus(probabilities, params.top_k or logits.shape[-1], params.top_p)
    return torch.where(weights >= params.min_p * weights.amax(-1, keepdim=True), weights, 0.0)


def nucleus(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """The probabilities with 0 for tokens that are not among the likeliest, as `sampling.nucleus`."""
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    ordered = ordered[:, :top_k]
    tokens = tokens[:, :top_k]
    if top_p < 1:
        sums = ordered.cumsum(-1)
        before = sums.roll(1, -1)
        before[:, 0] = 0.0
        needed = before < top_p * sums[:, -1:]
        needed[:, 0] = True
        ordered = torch.where(needed, ordered, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, tokens, ordered)


def uniforms_of(draw: Draw, depths: Sequence[int]) -> list[float]:
    """The keyed uniform of the token after each row; rows of one depth are rivals for one position."""
    known = {depth: keyed_uniform(draw.sampling.seed, draw.position + depth) for depth in set(depths)}
    return [known[depth] for depth in depths]


def choices(
    logits: Tensor, segments: Sequence[Segment], draws: Sequence[Draw | None], first_scored: Sequence[int]
) -> Tensor:
    """(choices) int32: the token after each kept row; the highest logit's where nothing is drawn."""
    choice = choose(logits)
    for segment, draw, first in zip(segments, draws, first_scored, strict=True):
        if draw is None or draw.sampling.temperature == 0:
            continue
        depths = segment.depths if is_tree(segment) else (0,)
        rows = slice(first, first + len(depths))
        uniform = torch.tensor(uniforms_of(draw, depths), dtype=torch.float64, device=logits.device)
        choice[rows] = choose(weights_of(logits[rows], draw.sampling), uniform)
    return choice


def walks_of(
    outcome: Sequence[Sequence[int]], segments: Sequence[Segment], draws: Sequence[Draw | None]
) -> tuple[Walk | None, ...]:
    """The host's form of the outcome of `tree_walk.walk`; a chunk's last row is the root of no tree."""
    walks: list[Walk | None] = []
    for (visited, last, *nodes), segment, draw in zip(outcome, segments, draws, strict=False):
        path = nodes[:visited] if is_tree(segment) else [0]
        tokens = (*(segment.tokens[node] for node in path[1:]), last)
        walks.append(None if draw is None else Walk(tuple(path), tokens))
    return tuple(walks)
