"""The target's own choice of a next token: greedy, or inverse CDF of a uniform keyed by (seed, position).

Because the uniform depends on nothing else, sampled output is the same token for token with and without drafts,
in any batch (keyed coupling; Maddison et al. 2014 for the idea of sharing the noise).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.types import SamplingParams

NUCLEUS = 512
"""Likeliest tokens that are looked at first; the whole vocabulary is sorted only when they do not suffice."""


def keyed_uniform(seed: int, position: int) -> float:
    """A uniform of [0, 1) that is a function of the two numbers alone."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=[position, 0, 0, 0])
    return float(np.random.Generator(bits).random())


def choose(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token at `position` given its logits (vocabulary,). Ties go to the lowest id."""
    if params.temperature == 0:
        return int(logits.argmax())
    tokens, weights = allowed(logits, params)
    cumulative = np.cumsum(weights)
    threshold = keyed_uniform(params.seed, position) * cumulative[-1]
    at = int(np.searchsorted(cumulative, threshold, side="right"))
    return int(tokens[min(at, len(tokens) - 1)])


def allowed(logits: Tensor, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that may be drawn, ascending, with their unnormalised probabilities.

    Filters act in this order: temperature, top-k, top-p, min-p. At equal probability the lower id stays. The best
    logit is taken off first, so that no temperature is too small to divide by.
    """
    exact = logits.double()
    probabilities = torch.softmax((exact - exact.max()) / params.temperature, -1)
    if params.top_k or params.top_p < 1:
        tokens, weights = nucleus(probabilities, params.top_k or len(probabilities), params.top_p)
    else:
        weights = probabilities.numpy()
        tokens = np.arange(len(weights))
    kept = (weights >= params.min_p * weights.max()) & (weights > 0)
    tokens, weights = tokens[kept], weights[kept]
    order = np.argsort(tokens)
    return tokens[order], weights[order]


def nucleus(probabilities: Tensor, top_k: int, top_p: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The likeliest tokens, at most `top_k`, up to the one with which their renormalised sum reaches `top_p`."""
    size = min(NUCLEUS, len(probabilities))
    while True:
        floor = torch.topk(probabilities, size).values[-1]
        tokens = torch.nonzero(probabilities >= floor).flatten().numpy()
        weights = probabilities.numpy()[tokens]
        order = np.lexsort((tokens, -weights))[:top_k]
        tokens, weights = tokens[order], weights[order]
        cumulative = np.cumsum(weights)
        total = cumulative[-1] if len(tokens) == top_k else 1.0
        complete = size == len(probabilities) or len(tokens) == top_k
        if complete or cumulative[-1] >= top_p * total:
            stop = int(np.searchsorted(cumulative, top_p * total)) + 1 if top_p < 1 else len(tokens)
            return tokens[:stop], weights[:stop]
        size = min(size * 16, len(probabilities))
