"""Figures from known answers."""

import io
from typing import Any

import pytest
from rich.console import Console

from agentspec.traces.client import Answer
from agentspec.traces.measure import TurnResult, bootstrap, decode_rate, speed_ratio, summarise
from agentspec.traces.options import ReplayOptions
from agentspec.traces.replay import Replayed
from agentspec.traces.report import common_length, print_report, report_of


def answer(tokens: int, decode_s: float | None = None, **report: Any) -> Answer:
    if decode_s is None:
        return Answer(text="t", completion_tokens=tokens, first_s=1.0, last_s=3.0)
    full = {"steps": tokens, "decode_s": decode_s, "token_ids": [1] * tokens, "drafted": {}, "accepted": {}, **report}
    return Answer(text="t", completion_tokens=tokens, prompt_tokens=10, report=full)


def turn(on: Answer, off: Answer | None = None) -> TurnResult:
    return TurnResult("a", 2, "digest", on, off)


def test_rate_weighs_turns_by_length() -> None:
    assert decode_rate([answer(10, 1.0), answer(30, 1.0)]) == 20.0
    assert decode_rate([answer(1, 0.1), answer(10, 1.9)]) == 5.5
    assert decode_rate([answer(1)]) is None
    assert decode_rate([]) is None


def test_rate_leaves_out_the_token_that_the_prompt_gave() -> None:
    assert decode_rate([answer(11, 1.0, decode_tokens=10), answer(11, 1.0, decode_tokens=11)]) == 10.5
    only_first = answer(1, 0.001, decode_tokens=0)
    assert decode_rate([only_first]) is None
    assert speed_ratio([turn(answer(5, 1.0), only_first)]) is None


def test_rate_without_a_report_is_by_the_client_clock() -> None:
    assert decode_rate([answer(21)]) == 10.0


def test_ratio_is_total_over_total() -> None:
    turns = [turn(answer(11, 1.0), answer(11, 4.0)), turn(answer(11, 1.0), answer(11, 2.0))]
    assert speed_ratio(turns) == pytest.approx(3.0)
    assert speed_ratio([turn(answer(11, 1.0))]) is None


def test_bootstrap_is_repeatable_and_holds_the_ratio() -> None:
    groups = [[turn(answer(11, 1.0), answer(11, float(ratio)))] for ratio in (1, 2, 3, 4, 5)]
    low, high = bootstrap(groups) or (0.0, 0.0)
    assert 1.0 <= low < 3.0 < high <= 5.0
    assert bootstrap(groups) == (low, high)


def test_bootstrap_of_one_trajectory_says_nothing() -> None:
    assert bootstrap([[turn(answer(11, 1.0), answer(11, 2.0))]]) is None


def test_bootstrap_redraws_whole_trajectories() -> None:
    alike = [[turn(answer(11, 1.0), answer(11, 1.0)), turn(answer(11, 1.0), answer(11, 3.0))] for _ in range(4)]
    assert bootstrap(alike) == pytest.approx((2.0, 2.0))


def test_summary_of_nothing() -> None:
    summary = summarise([])
    assert (summary["turns"], summary["tokens"], summary["steps"], summary["speed_ratio"]) == (0, 0, None, None)


def test_identity_compares_tokens_before_text() -> None:
    assert turn(answer(3, 1.0), answer(3, 2.0)).identical is True
    assert turn(answer(3, 1.0), answer(2, 2.0)).identical is False
    assert turn(answer(3), answer(4)).identical is True
    assert turn(answer(3)).identical is None
    call = [{"index": 0, "id": "x", "function": {"name": "f", "arguments": "{}"}}]
    other = [{"index": 0, "id": "y", "function": {"name": "f", "arguments": "{}"}}]
    assert turn(Answer(calls=call), Answer(calls=other)).identical is True


@pytest.mark.parametrize(("first", "second", "length"), [([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0)])
def test_common_length(first: list[int], second: list[int], length: int) -> None:
    assert common_length(first, second) == length


def printed(turns: list[TurnResult], width: int = 160, name: str = "run/one", **options: Any) -> str:
    chosen = ReplayOptions(**options)
    report = report_of(Replayed("tiny", {name: turns}, {name: 1}), chosen, "agentspec replay")
    out = io.StringIO()
    print_report(report, Console(file=out, width=width))
    return out.getvalue()


def test_the_table_of_a_long_replay_fits_80_columns() -> None:
    on = answer(1234, 10.0, steps=256, drafted_total=200, accepted_total=75)
    text = printed(
        [turn(on, answer(1234, 40.0))] * 137, width=80, name="recorded/inventory-reservations", baseline=True
    )
    table = text[: text.index("Decode speed")].splitlines()
    row = next(line for line in table if "total" in line)
    figures = ["total", "137", "169058", "4.82", "38%", "30.9", "123.4", "4.00", "137/137"]
    assert row.split() == figures
    assert max(len(line) for line in table) <= 80 and "…" not in text


def test_table_shows_both_arms_and_what_was_accepted() -> None:
    on = answer(10, 1.0, steps=4, drafted_total=9, accepted_total=7)
    text = printed([turn(on, answer(10, 2.0))], baseline=True)
    for cell in ("run/one", "2.50", "78%", "5.0", "10.0", "2.00", "1/1"):
        assert cell in text
    assert "Decode speed with speculation over without: 2.00." in text
    assert "1 turns were skipped" in text


def test_table_of_a_plain_server_says_whose_clock_it_is() -> None:
    assert "by this client's clock" in printed([turn(answer(21))])


def test_speed_without_speculation_stands_in_its_own_column() -> None:
    on = printed([turn(answer(10, 1.0))])
    off = printed([turn(answer(10, 1.0))], speculation=False)
    row = next(line for line in on.splitlines() if "run/one" in line).split()
    other = next(line for line in off.splitlines() if "run/one" in line).split()
    assert row.index("10.0") == other.index("10.0") + 1
