"""Log-probabilities of chosen tokens, from the target's own logits."""

import torch
from torch import Tensor

from agentspec.types import TokenLogprob


def token_logprobs(logits: Tensor, tokens: tuple[int, ...], top: int) -> tuple[TokenLogprob, ...]:
    """For each row of logits (tokens, vocabulary) its token's log-probability and those of the `top` likeliest.

    Natural logarithms of the model's distribution at temperature 1, before penalties, biases and filters.
    """
    logs = torch.log_softmax(logits.double(), -1)
    chosen = logs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
    best = logs.topk(min(top, logs.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, own, tuple(zip(likeliest, values, strict=True)))
        for token, own, (likeliest, values) in zip(tokens, chosen, pairs, strict=True)
    )
