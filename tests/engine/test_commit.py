from itertools import combinations, pairwise

import pytest

from agentspec.engine.commit import Completion, commit
from agentspec.engine.text import TextStream
from agentspec.types import FinishReason

PIECES = [bytes([i]) for i in range(128)]
END = 3


def completion(max_tokens: int, stop: tuple[str, ...] = ()) -> Completion:
    return Completion(TextStream(PIECES, stop), max_tokens, frozenset({END}))


def run(tokens: list[int], cut: tuple[int, ...], max_tokens: int, stop: tuple[str, ...]) -> tuple[object, ...]:
    """Commit the tokens as accepted runs cut at the given places."""
    done = completion(max_tokens, stop)
    text = ""
    bounds = [0, *cut, len(tokens)]
    for start, end in pairwise(bounds):
        if done.finish is None and end > start:
            text += commit(done, tokens[start:end])[1]
    return done.tokens, text, done.finish


def test_eng_02_a_stop_inside_a_run_wins_over_the_cap() -> None:
    done = completion(5)
    kept, _ = commit(done, [10, 11, END, 20, 21, 22])
    assert (kept, done.tokens, done.finish) == (3, [10, 11, END], FinishReason.STOP)


def test_eng_02_a_stop_beyond_the_cap_is_not_seen() -> None:
    done = completion(5)
    kept, _ = commit(done, [10, 11, 12, 13, 14, END])
    assert (kept, done.finish) == (5, FinishReason.LENGTH)


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    done = completion(3)
    commit(done, [10, 11, END])
    assert done.finish is FinishReason.STOP


def test_eng_01_a_stop_string_early_in_a_long_run_is_found() -> None:
    tokens = [ord(c) for c in "aSTOPbcdef"]
    done = completion(50, ("STOP",))
    kept, text = commit(done, tokens)
    assert (kept, text, done.finish) == (5, "a", FinishReason.STOP)


def test_eng_04_text_and_tokens_end_together_at_a_stop_string() -> None:
    tokens = [ord(c) for c in "well ha ha ha ha ha"]
    done = completion(50, (" ha ha ha",))
    kept, text = commit(done, tokens)
    assert text == "well"
    assert bytes(done.tokens) == b"well ha ha ha"
    assert kept == len(done.tokens)


def test_api_31_one_token_is_one_token_whatever_was_accepted() -> None:
    done = completion(1)
    kept, text = commit(done, [ord("a"), ord("b"), ord("c")])
    assert (kept, text, done.finish) == (1, "a", FinishReason.LENGTH)


@pytest.mark.parametrize("stop", [(), ("lo w",), ("d",)])
@pytest.mark.parametrize("max_tokens", [1, 4, 7, 30])
def test_every_split_into_accepted_runs_gives_the_same_result(stop: tuple[str, ...], max_tokens: int) -> None:
    tokens = [*[ord(c) for c in "hello wor"], END, ord("d")]
    expected = run(tokens, tuple(range(1, len(tokens))), max_tokens, stop)
    for size in range(4):
        for cut in combinations(range(1, len(tokens)), size):
            assert run(tokens, cut, max_tokens, stop) == expected
