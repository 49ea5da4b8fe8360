"""Progress where there is no terminal: a line now and then, on standard error."""

import pytest

from agentspec.commands import display


@pytest.mark.parametrize(("every", "lines"), [(0.0, ["1 of 2 turns done", "2 of 2 turns done"]), (1e9, [])])
def test_turns_are_told_now_and_then(
    every: float, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "EVERY_S", every)
    with display.turn_progress() as progress:
        progress(1, 2)
        progress(2, 2)
    told = capsys.readouterr()
    assert told.err.splitlines() == lines
    assert told.out == ""
