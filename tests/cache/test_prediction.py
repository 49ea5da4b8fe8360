"""Predicted answers: followed, left and found again."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.draft import draft
from agentspec.cache.prediction import BEHIND, LOOK_BACK, Prediction, PredictionGuide, resumed
from agentspec.traces.simulate import accepted
from agentspec.types import Origin

tokens = st.lists(st.integers(0, 3), max_size=40)


def array(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def steps(predicted: Sequence[int], answer: Sequence[int], budget: int = 16) -> int:
    """Steps in which an answer is written with a prediction alone."""
    guide, rest, count, last = PredictionGuide(Prediction(predicted)), list(answer), 0, 0
    while rest:
        offer, done = guide.offer(), 1
        if offer is not None:
            tree = draft([offer], array([last]), budget)
            assert set(tree.origin[1:]) <= {Origin.PREDICTION}
            assert all(token in predicted for token in tree.token[1:])
            done = min(1 + len(accepted((tree.token, tree.parent), rest)), len(rest))
        guide.observe(array(rest[:done]))
        last, rest, count = rest[done - 1], rest[done:], count + 1
    return count


def slow_resumed(predicted: list[int], tail: list[int], last: int) -> tuple[int, int]:
    """Every place, judged by itself."""
    found = []
    for place in range(1, len(predicted) + 1):
        length = 0
        while length < min(place, len(tail)) and predicted[place - 1 - length] == tail[-1 - length]:
            length += 1
        value = length if place >= last else length - BEHIND
        if value > 0:
            found.append((-value, abs(place - last), place, length))
    return min(found)[2:] if found else (-1, 0)


@settings(deadline=None, max_examples=80)
@given(tokens, st.lists(st.integers(0, 3), min_size=1, max_size=LOOK_BACK), st.integers(0, 40))
def test_the_place_found_again_equals_that_of_its_slow_twin(predicted: list[int], tail: list[int], last: int) -> None:
    assert resumed(array(predicted), array(tail), last) == slow_resumed(predicted, tail, last)


def test_a_right_prediction_is_drafted_from_its_first_token_on() -> None:
    text = list(range(200))
    assert steps(text, text) <= 14
    guide = PredictionGuide(Prediction(text))
    offer = guide.offer()
    assert offer is not None
    assert draft([offer], array([7]), 8).token[1:] == tuple(range(8))


def test_edits_cost_a_few_steps_each() -> None:
    text = list(range(200))
    plain = steps(text, text)
    inserted = [*text[:80], 900, 901, 902, *text[80:]]
    deleted = text[:80] + text[95:]
    replaced = [*text[:80], 900, 901, *text[83:]]
    for changed, new in ((inserted, 3), (deleted, 0), (replaced, 2)):
        assert steps(text, changed) <= plain + new + 3


def test_a_repeated_line_does_not_pull_the_answer_back() -> None:
    """The same line stands at three places; after an edit the next one is meant."""
    line = [50, 51, 52]
    text = [1, 2, 3, 4, 5, *line, 10, 11, 12, 13, 14, *line, 20, 21, 22, 23, 24, *line, 30, 31]
    guide = PredictionGuide(Prediction(text))
    guide.observe(array(text[:13]))
    guide.observe(array([99, *line]))
    assert guide.place == text.index(20)
    offer = guide.offer()
    assert offer is not None
    assert draft([offer], array(line), 4).token[1] == 20


def test_a_long_match_leads_back_all_the_same() -> None:
    text = list(range(100))
    guide = PredictionGuide(Prediction(text))
    guide.observe(array([*text[:90], *text[10 : 10 + BEHIND + 1]]))
    assert guide.place == 10 + BEHIND + 1


@settings(deadline=None, max_examples=50)
@given(tokens, tokens)
def test_any_answer_to_any_prediction_is_written(predicted: list[int], answer: list[int]) -> None:
    assert steps(predicted, answer) <= len(answer)


@settings(deadline=None, max_examples=50)
@given(tokens, tokens, st.data())
def test_the_cuts_of_an_answer_do_not_matter(predicted: list[int], answer: list[int], data: st.DataObject) -> None:
    whole, cut = PredictionGuide(Prediction(predicted)), PredictionGuide(Prediction(predicted))
    cut.prediction = whole.prediction
    whole.observe(array(answer))
    at = data.draw(st.integers(0, len(answer)))
    cut.observe(array(answer[:at]))
    cut.observe(array(answer[at:]))
    assert (whole.place, whole.matched, whole.last) == (cut.place, cut.matched, cut.last)
    assert whole.offer() == cut.offer()


def test_an_empty_prediction_offers_nothing() -> None:
    guide = PredictionGuide(Prediction([]))
    assert guide.offer() is None
    guide.observe(array([1, 2]))
    assert guide.offer() is None


def test_a_long_step_is_followed_like_short_ones() -> None:
    text = [*range(100), 7, 8, 9, 10]
    said = [*range(500, 540), *range(20, 70)]
    once, bit_by_bit = PredictionGuide(Prediction(text)), PredictionGuide(Prediction(text))
    once.observe(array(said))
    for token in said:
        bit_by_bit.observe(array([token]))
    assert (
        (once.place, once.matched, once.last) == (bit_by_bit.place, bit_by_bit.matched, bit_by_bit.last) == (70, 50, 70)
    )
