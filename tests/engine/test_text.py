from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentspec.engine.text import TextStream, TokenBytes, possible_stop


def stream(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Texts given out per piece, then at the end."""
    text = TextStream(pieces, stop)
    out = []
    for token in range(len(pieces)):
        out.append(text.push(token))
        if text.stopped:
            return out, text
    return [*out, text.finish()], text


def cuts(data: bytes, at: list[int]) -> list[bytes]:
    bounds = [0, *sorted(set(at)), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def test_str_01_a_character_split_over_two_tokens_comes_out_whole() -> None:
    out, _ = stream([b"\xf0\x9f", b"\x8c\x8d"])
    assert out == ["", "🌍", ""]


def test_str_02_a_split_character_does_not_freeze_what_follows() -> None:
    out, _ = stream([b"\xf0\x9f", b"\x8c\x8d", *[b"x"] * 200])
    assert "".join(out) == "🌍" + "x" * 200
    assert all(out[2:202])


def test_invalid_bytes_become_marks_and_never_stall() -> None:
    out, _ = stream([b"a\xff", b"b", b"\xf0\x9f", b"c"])
    assert "".join(out) == "a\ufffdb\ufffdc"
    assert out[1] == "b"


def test_str_07_the_start_of_a_stop_string_is_held_back() -> None:
    out, text = stream([b"hi", b"\nUser", b":"], ("\nUser:",))
    assert out == ["hi", "", ""]
    assert text.stopped


def test_a_held_back_start_that_is_no_stop_is_given_out() -> None:
    out, text = stream([b"\nUs", b"age"], ("\nUser:",))
    assert out == ["", "\nUsage", ""]
    assert not text.stopped


def test_str_10_nothing_is_sent_twice_when_a_stop_spans_tokens() -> None:
    out, text = stream([b"<unk>", b"<unk>"], ("><",))
    assert "".join(out) == "<unk"
    assert text.stopped


def test_the_earliest_stop_wins() -> None:
    out, _ = stream([b"one two three"], ("three", "two"))
    assert "".join(out) == "one "


DATA = "naïve 🌍 café\nUser: stop here ▁ 漢字".encode()


@given(st.lists(st.integers(0, len(DATA))), st.sampled_from([(), ("\nUser:",), ("漢",), ("é\n", "zzz")]))
def test_any_cut_of_the_same_bytes_gives_the_same_text(at: list[int], stop: tuple[str, ...]) -> None:
    whole = DATA.decode()
    ends = [whole.find(s) for s in stop if s in whole]
    expected = whole[: min(ends)] if ends else whole
    out, _ = stream(cuts(DATA, at), stop)
    assert "".join(out) == expected


@pytest.mark.parametrize(("text", "size"), [("abc", 0), ("ab\n", 1), ("\nUs", 3), ("\n\n", 1), ("", 0)])
def test_possible_stop_is_the_longest_tail_that_starts_a_stop(text: str, size: int) -> None:
    assert possible_stop(text, ["\nUser:", "\n\n\n\n"]) == (2 if text == "\n\n" else size)


def test_token_bytes_join_to_what_the_tokenizer_decodes(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    table = TokenBytes(tokenizer)
    text = "Grüße, 漢字 🌍\n\tx = {1: 2}"
    ids = tokenizer.encode(text)
    assert b"".join(table[i] for i in ids).decode() == text
    assert table[tokenizer.eos_token_id] == b""
    assert table[10**6] == b""
