"""Log-probabilities of tokens, from the target's own logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.types import TokenLogprob

LOGITS_AT_ONCE = 2**23
"""Most logits of prompt tokens that one pass computes: 32 MiB, and four times as much while they become logarithms."""


def rows_at_once(vocabulary: int) -> int:
    """Prompt tokens whose logits are computed in one pass."""
    return max(1, LOGITS_AT_ONCE // vocabulary)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """For each row of logits (tokens, vocabulary) its token's log-probability and those of the `top` likeliest.

    Natural logarithms of the model's distribution at temperature 1, before penalties, biases and filters.
    """
    logs = torch.log_softmax(logits.double(), -1)
    chosen = logs.gather(1, torch.tensor(tokens).unsqueeze(1))
    ranks = (1 + (logs > chosen).sum(-1)).tolist()
    best = logs.topk(min(top, logs.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, own, tuple(zip(likeliest, values, strict=True)), rank)
        for token, own, rank, (likeliest, values) in zip(tokens, chosen.squeeze(1).tolist(), ranks, pairs, strict=True)
    )
