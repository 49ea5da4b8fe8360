"""What a request changes about the target's logits before a token is chosen: penalties, biases, a least length.

All of it depends on the tokens before the position alone, so a node of a tree is judged by its own path, and a run of
accepted drafts gives what plain decoding gives (Keskar et al. 2019 for the repetition penalty; the additive
penalties are OpenAI's).
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from agentspec.types import SamplingParams


class Adjuster:
    """The adjustments of one request. `push` tells it every token that is chosen, in order."""

    def __init__(self, sampling: SamplingParams, prompt: Iterable[int], end_tokens: Collection[int]) -> None:
        self.sampling = sampling
        self.end_tokens = torch.tensor(sorted(end_tokens), dtype=torch.long)
        self.counts: dict[int, int] = {}
        """How often each token was generated."""

        self.seen = set(prompt) if sampling.repetition_penalty != 1 else set()
        """Tokens of the prompt and the completion."""

        self.length = 0
        bias = sampling.logit_bias
        self.biased = torch.tensor([token for token, _ in bias], dtype=torch.long)
        self.biases = torch.tensor([value for _, value in bias], dtype=torch.float32)

    @staticmethod
    def of(sampling: SamplingParams, prompt: Iterable[int], end_tokens: Collection[int]) -> "Adjuster | None":
        """None where nothing is to be adjusted."""
        neutral = SamplingParams()
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "min_tokens")
        if all(getattr(sampling, name) == getattr(neutral, name) for name in names):
            return None
        return Adjuster(sampling, prompt, end_tokens)

    def push(self, token: int) -> None:
        """`token` was chosen."""
        self.length += 1
        self.counts[token] = self.counts.get(token, 0) + 1
        if self.sampling.repetition_penalty != 1:
            self.seen.add(token)

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token's logits (vocabulary,), adjusted; a copy.

        In this order: repetition penalty, frequency and presence penalty, bias, least length.
        """
        sampling = self.sampling
        adjusted = logits.clone()
        if self.seen:
            places = torch.tensor(sorted(self.seen), dtype=torch.long)
            values = adjusted[places]
            penalty = sampling.repetition_penalty
            adjusted[places] = torch.where(values > 0, values / penalty, values * penalty)
        if self.counts and (sampling.frequency_penalty or sampling.presence_penalty):
            places = torch.tensor(list(self.counts), dtype=torch.long)
            times = torch.tensor(list(self.counts.values()), dtype=torch.float32)
            adjusted[places] -= sampling.frequency_penalty * times + sampling.presence_penalty
        adjusted[self.biased] += self.biases
        if self.length < sampling.min_tokens:
            adjusted[self.end_tokens] = float("-inf")
        return adjusted
