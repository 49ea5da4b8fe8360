from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.engine.sampling import allowed, choose, keyed_uniform, nucleus
from agentspec.types import SamplingParams


def slow_allowed(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """The filters one after the other, on plain lists."""
    p = torch.softmax(logits.double() / params.temperature, -1).tolist()
    ranked = sorted(range(len(p)), key=lambda i: (-p[i], i))[: params.top_k or len(p)]
    total = sum(p[i] for i in ranked) if len(ranked) == params.top_k else 1.0
    kept, mass = [], 0.0
    for i in ranked:
        kept.append(i)
        mass += p[i]
        if params.top_p < 1 and mass >= params.top_p * total:
            break
    top = max(p[i] for i in kept)
    return {i: p[i] for i in kept if p[i] >= params.min_p * top}


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([2, 5, 40, 1200]),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.2, 0.7, 1.0, 2.0]),
        top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
        top_k=st.sampled_from([0, 1, 3, 50]),
        min_p=st.sampled_from([0.0, 0.05, 0.5]),
    ),
)
def test_filters_equal_their_slow_twin(seed: int, size: int, params: SamplingParams) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    tokens, weights = allowed(logits, params)
    expected = slow_allowed(logits, params)
    assert tokens.tolist() == sorted(expected)
    np.testing.assert_allclose(weights, [expected[t] for t in tokens.tolist()], rtol=1e-9)


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(600)
    tokens, _ = nucleus(torch.softmax(logits.double(), -1), 3, 1.0)
    assert tokens.tolist() == [0, 1, 2]
    assert choose(logits, SamplingParams(), 0) == 0


def test_a_keyed_uniform_depends_on_seed_and_position_only() -> None:
    assert keyed_uniform(3, 5) == keyed_uniform(3, 5)
    values = {keyed_uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(values) == 400
    assert all(0 <= value < 1 for value in values)
    assert keyed_uniform(-1, 0) == keyed_uniform(2**64 - 1, 0)


def test_drawn_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4000)]
    counts = Counter(choose(logits, p, 7) for p in params)
    for token, probability in enumerate([0.5, 0.2, 0.2, 0.1]):
        deviation = (probability * (1 - probability) * 4000) ** 0.5
        assert abs(counts[token] - 4000 * probability) < 4 * deviation


def test_temperature_zero_ignores_the_seed() -> None:
    logits = torch.tensor([0.1, 2.0, 1.9])
    assert {choose(logits, SamplingParams(seed=seed), 0) for seed in range(50)} == {1}
