"""The walk against its law: whatever the tree, the output is what the target alone would say."""

from functools import partial
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from agentspec.engine.verify import walk
from agentspec.types import DraftTree


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


def at_depth(drawn: tuple[int, ...], node: int, depth: int) -> int:
    return drawn[depth]


def test_the_exact_law_by_enumeration_over_a_vocabulary_of_five() -> None:
    """Sampled walk: with a shared uniform per depth, each emitted token has the target's own probability."""
    p = {(): [0.1, 0.2, 0.3, 0.25, 0.15], (0,): [0.5, 0.1, 0.1, 0.1, 0.2], (2,): [0.05, 0.05, 0.6, 0.1, 0.2]}
    tree = tree_of([(0, 4), (2, 2)], 7)
    total: dict[tuple[int, ...], float] = {}
    for first, second in product(range(5), repeat=2):
        drawn = (first, second, 0)
        tokens = walk(tree, partial(at_depth, drawn)).tokens
        probability = p[()][first] * (p[(first,)][second] if first in (0, 2) else 0.2)
        total[tokens] = total.get(tokens, 0.0) + probability
    for tokens, probability in total.items():
        expected = p[()][tokens[0]] * (p[(tokens[0],)][tokens[1]] if len(tokens) > 1 else 1.0)
        assert abs(probability - expected) < 1e-12
    assert abs(sum(total.values()) - 1) < 1e-12
