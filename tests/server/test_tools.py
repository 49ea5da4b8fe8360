"""Tool calls in text, cut everywhere."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.server.tools import Call, ToolParser, read_call

TWO_CALLS = (
    'I will look.\n<tool_call>\n{"name": "read", "arguments": {"path": "a<b>.py"}}\n</tool_call>\n'
    '<tool_call>{"name":"write","arguments":"{\\"text\\":\\"</tool_call>\\"}"}</tool_call>\nDone.'
)
TRANSCRIPTS = [
    TWO_CALLS,
    "no call at all < <tool <tool_cal",
    "<tool_call>",
    '<tool_call>\n{"name": "f"}',
    '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}</tool_call>',
    'a <tool_call>{"name": 3}</tool_call> b <tool_call>{"name": "f"}</tool_call>',
    'x <tool_call>{"name": "f", "arguments": {"a": "unclosed}}</tool_call> y',
    ' \n<tool_call>{"name": "f", "arguments": {"a": "\\\\\\""}}</tool_call> \n ',
    "<<tool_call>",
]

Pieces = list[str | Call]


def joined(pieces: Pieces) -> Pieces:
    """Neighbouring texts made one."""
    result: Pieces = []
    for piece in pieces:
        if isinstance(piece, str) and result and isinstance(result[-1], str):
            result[-1] += piece
        else:
            result.append(piece)
    return result


def parsed(*deltas: str) -> Pieces:
    parser = ToolParser()
    pieces = [piece for delta in deltas for piece in parser.feed(delta)]
    return joined(pieces + parser.finish())


def test_two_calls_with_text_around() -> None:
    read = Call("read", '{"path": "a<b>.py"}')
    write = Call("write", '{"text": "</tool_call>"}')
    assert parsed(TWO_CALLS) == ["I will look.", read, write, "Done."]


@pytest.mark.parametrize("text", TRANSCRIPTS)
def test_str_13_every_cut_gives_the_same_pieces(text: str) -> None:
    whole = parsed(text)
    assert parsed(*text) == whole
    for first in range(len(text) + 1):
        assert parsed(text[:first], text[first:]) == whole
        for second in range(first, len(text) + 1, 3):
            assert parsed(text[:first], text[first:second], text[second:]) == whole


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', '"', "\\", "<", " ", "\n", "é"]
        )
    ),
    st.data(),
)
def test_str_13_any_markup_cut_anywhere(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(*pieces) == parsed(text)


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet='<tol_ca>/ \n"{}x'))
def test_nothing_but_space_is_lost(text: str) -> None:
    """These letters cannot spell a whole call, so all of the text comes back."""
    assert parsed(text) == ([text] if text else [])


def test_str_14_a_complete_call_in_one_delta() -> None:
    parser = ToolParser()
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>') == [Call("f", '{"a": 1}')]
    assert parser.finish() == []


def test_str_16_a_marker_alone_in_a_delta() -> None:
    parser = ToolParser()
    assert parser.feed("<tool_call>") == []
    assert parser.feed("{") == []
    assert parser.feed('"name": "f", "arguments": {}}') == []
    assert parser.feed("</tool_call>") == [Call("f", "{}")]


def test_str_11_text_held_back_at_the_end_is_given() -> None:
    parser = ToolParser()
    assert parser.feed("a <tool_") == ["a"]
    assert parser.finish() == [" <tool_"]


def test_only_a_possible_marker_is_held_back() -> None:
    parser = ToolParser()
    assert parser.feed("1 < 2") == ["1 < 2"]
    assert parser.feed(" <to") == []
    assert parser.feed("day>") == [" <today>"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        "[]",
        "not json",
        '{"name": ""}',
        '{"name": 7, "arguments": {}}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "not json"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3001,
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    ],
)
def test_a_malformed_call_comes_back_as_text(body: str) -> None:
    text = f"x <tool_call>{body}</tool_call> y"
    assert parsed(text) == [text]


def test_arguments_are_json_whatever_the_model_wrote() -> None:
    call = read_call('{"name": "f", "arguments": {"a": "two\nlines", "b": "\\ud800"}}')
    assert call is not None
    assert json.loads(call.arguments) == {"a": "two\nlines", "b": "\ud800"}
    assert re.fullmatch(r"[ -~]+", call.arguments)


def test_missing_arguments_are_empty() -> None:
    assert read_call('{"name": "f"}') == Call("f", "{}")


def test_a_long_call_is_scanned_once() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x<" * 50_000 + '"}}</tool_call>'
    (call,) = parsed(*(text[start : start + 4] for start in range(0, len(text), 4)))
    assert isinstance(call, Call)
    assert len(json.loads(call.arguments)["a"]) == 100_000
