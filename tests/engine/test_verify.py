"""The walk against its law: whatever the tree, the output is what the target alone would say."""

from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.engine import sampling
from agentspec.engine.sampling import allowed, choose
from agentspec.engine.verify import walk
from agentspec.types import DraftTree, SamplingParams


def tree_of(paths: list[tuple[int, ...]], root: int) -> DraftTree:
    """Trie of token paths below a root."""
    token, parent, depth = [root], [-1], [0]
    index: dict[tuple[int, int], int] = {}
    for path in paths:
        at = 0
        for t in path:
            if (at, t) not in index:
                index[at, t] = len(token)
                token.append(t)
                parent.append(at)
                depth.append(depth[at] + 1)
            at = index[at, t]
    zeros = (0.0,) * len(token)
    return DraftTree(tuple(token), tuple(parent), tuple(depth), zeros, zeros, (0,) + (1,) * (len(token) - 1))


def counting(prefix: tuple[int, ...]) -> int:
    """A target anyone can predict: a fixed function of the prefix."""
    return (sum(prefix) * 7 + len(prefix)) % 5


def emitted(tree: DraftTree) -> tuple[int, ...]:
    prefixes: list[tuple[int, ...]] = [(tree.token[0],)]
    for node in range(1, len(tree)):
        prefixes.append((*prefixes[tree.parent[node]], tree.token[node]))
    return walk(tree, lambda node, _: counting(prefixes[node])).tokens


@given(st.lists(st.lists(st.integers(0, 4), max_size=6).map(tuple), max_size=20), st.integers(0, 4))
def test_the_walk_emits_what_the_target_alone_emits(paths: list[tuple[int, ...]], root: int) -> None:
    tokens = emitted(tree_of(paths, root))
    sequence: tuple[int, ...] = (root,)
    for token in tokens:
        assert token == counting(sequence)
        sequence = (*sequence, token)


def test_a_right_draft_is_accepted_whole_and_adds_one_token() -> None:
    sequence: tuple[int, ...] = (2,)
    for _ in range(4):
        sequence = (*sequence, counting(sequence))
    assert len(emitted(tree_of([sequence[1:]], 2))) == 5


def test_eng_07_the_first_draft_token_is_checked_too() -> None:
    tree = tree_of([(1,)], 1)
    result = walk(tree, lambda node, _: 2)
    assert result.path == (0,)
    assert result.tokens == (2,)


def test_eng_08_the_corrected_token_is_the_one_emitted_and_counted_once() -> None:
    for wrong in product(range(1, 4), repeat=2):
        result = walk(tree_of([wrong], 0), lambda node, _: 9)
        assert (result.path, result.tokens) == ((0,), (9,))


VOCABULARY = 5
DEPTH = 3


def logits_after(prefix: tuple[int, ...], seed: int) -> torch.Tensor:
    """A random target: some logits for every prefix."""
    number = sum((token + 1) * 7**place for place, token in enumerate(prefix))
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed * 100_003 + number)) * 2


def pieces(prefix: tuple[int, ...], seed: int, params: SamplingParams) -> list[tuple[int, float, float]]:
    """The tokens that may follow a prefix with their probabilities, by the filters alone, and for each a uniform that
    the inverse of the distribution function takes to it."""
    tokens, weights = allowed(logits_after(prefix, seed), params)
    shares = weights / weights.sum()
    ends = np.cumsum(shares)
    return [(int(t), float(p), float(end - p / 2)) for t, p, end in zip(tokens, shares, ends, strict=True)]


@settings(deadline=None, max_examples=12)
@given(
    paths=st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=DEPTH).map(tuple), max_size=12),
    seed=st.integers(0, 1000),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.6, 1.0, 1.7]),
        top_p=st.sampled_from([0.7, 1.0]),
        top_k=st.sampled_from([0, 3]),
        min_p=st.sampled_from([0.0, 0.1]),
    ),
)
def test_the_exact_law_by_enumeration_over_a_vocabulary_of_five(
    paths: list[tuple[int, ...]], seed: int, params: SamplingParams
) -> None:
    """All outputs of three tokens, each with the measure of the uniforms that lead to it, against the product of the
    target's probabilities: total variation below 1e-12."""
    drafted = tree_of(paths, root=2)
    law: dict[tuple[int, ...], float] = {}
    right: dict[tuple[int, ...], float] = {}

    def plain(prefix: tuple[int, ...], probability: float, uniforms: tuple[float, ...]) -> None:
        """The target's own law; and what drafts make of a point of each cell of uniforms."""
        if len(uniforms) == DEPTH:
            right[prefix[1:]] = right.get(prefix[1:], 0.0) + probability
            output = generated(uniforms)
            law[output] = law.get(output, 0.0) + probability
            return
        for token, share, uniform in pieces(prefix, seed, params):
            plain((*prefix, token), probability * share, (*uniforms, uniform))

    def generated(uniforms: tuple[float, ...]) -> tuple[int, ...]:
        """Tokens by walks through the drafted tree, then through bare roots, under given uniforms."""
        sequence: tuple[int, ...] = (2,)
        tree = drafted
        while len(sequence) <= DEPTH:
            prefixes = [sequence]
            for node in range(1, len(tree)):
                prefixes.append((*prefixes[tree.parent[node]], tree.token[node]))
            begin = len(sequence) - 1

            def choice(node: int, depth: int, begin: int = begin, known: Any = prefixes) -> int:
                position = begin + depth
                with patch.object(sampling, "keyed_uniform", lambda *_: (*uniforms, *[0.5] * DEPTH)[position]):
                    return choose(logits_after(known[node], seed), params, position)

            sequence = (*sequence, *walk(tree, choice).tokens)
            tree = DraftTree.root(sequence[-1])
        return sequence[1 : DEPTH + 1]

    plain((2,), 1.0, ())
    assert abs(sum(right.values()) - 1) < 1e-12
    outputs = law.keys() | right.keys()
    assert sum(abs(law.get(output, 0.0) - right.get(output, 0.0)) for output in outputs) / 2 < 1e-12
