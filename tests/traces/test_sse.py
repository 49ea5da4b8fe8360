"""Server-sent events in any pieces."""

import pytest

from agentspec.errors import ReplayError
from agentspec.traces.sse import EventReader

STREAMS = [
    b'data: {"a":1}\n\ndata: [DONE]\n\n',
    'data: {"text":"中文 🙂 é"}\r\n\r\ndata: [DONE]\r\n\r\n'.encode(),
    b"data: one\r\rdata: two\r\r",
    b": keep-alive\n\nevent: message\nid: 7\ndata: first\ndata: second\n\n\n\ndata:third\n\n",
]
EVENTS = [
    ['{"a":1}', "[DONE]"],
    ['{"text":"中文 🙂 é"}', "[DONE]"],
    ["one", "two"],
    ["first\nsecond", "third"],
]


def read(*pieces: bytes) -> list[str]:
    reader = EventReader()
    events = [event for piece in pieces for event in reader.feed(piece)]
    return [*events, *reader.close()]


@pytest.mark.parametrize(("stream", "events"), list(zip(STREAMS, EVENTS, strict=True)))
def test_str_04_str_05_every_cut_gives_the_same_events(stream: bytes, events: list[str]) -> None:
    for cut in range(len(stream) + 1):
        assert read(stream[:cut], stream[cut:]) == events, cut


@pytest.mark.parametrize(("stream", "events"), list(zip(STREAMS, EVENTS, strict=True)))
def test_str_05_single_bytes_give_the_same_events(stream: bytes, events: list[str]) -> None:
    assert read(*(stream[at : at + 1] for at in range(len(stream)))) == events


def test_str_05_event_without_blank_line_is_not_an_event() -> None:
    assert read(b"data: one\n\ndata: tw") == ["one"]
    assert read(b"data: one\n\ndata: two\n") == ["one"]
    assert read(b"data: one\n\ndata: two\n\r") == ["one", "two"]


def test_events_are_given_as_soon_as_they_are_complete() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: one\n")) == []
    assert list(reader.feed(b"\nda")) == ["one"]


def test_bytes_that_are_not_utf_8_are_refused() -> None:
    with pytest.raises(ReplayError, match="not UTF-8"):
        read(b"data: \xff\n\n")
