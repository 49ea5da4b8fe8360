import random

import pytest

from agentspec.policies.cost import PLAIN_EVERY, CostTable, LearnedCost


def test_costs_are_linear_between_measurements_and_never_fall() -> None:
    table = CostTable.measured({100: {1: 10.0, 2: 9.0, 4: 12.0}, 300: {1: 20.0, 2: 20.0, 4: 24.0}})
    assert (table(1, 100), table(2, 100), table(3, 100), table(6, 100)) == (10.0, 10.0, 11.0, 14.0)
    assert (table(4, 200), table(4, 400)) == (18.0, 30.0)
    assert table(1, 0) == 10.0


def truth(rows: int, context: float) -> float:
    return 40 + 2 * rows + 0.005 * context


def disturbed() -> LearnedCost:
    """A start-up measurement under load: everything slow, and more rows nearly free."""
    slow = {1: 1600.0, 4: 1610.0, 8: 1620.0, 16: 1640.0}
    return LearnedCost(CostTable.measured({256: slow, 2048: slow}))


def test_a_disturbed_measurement_is_corrected_by_the_passes_that_happen() -> None:
    cost, dice = disturbed(), random.Random(0)
    for _ in range(300):
        rows = dice.choice([1, 4, 8, 16])
        load = 1 + (dice.random() < 0.2) * dice.random() * 5
        cost.observe(rows, 700, truth(rows, 700) * load, plain=rows == 1)
    for rows in (1, 4, 8, 16):
        assert cost(rows, 700) == pytest.approx(truth(rows, 700), rel=0.15)
    assert cost(8, 700) / cost(1, 700) == pytest.approx(truth(8, 700) / truth(1, 700), rel=0.1)


def test_more_rows_never_cost_less_even_where_one_count_was_never_seen() -> None:
    cost = disturbed()
    for _ in range(50):
        cost.observe(8, 700, truth(8, 700), plain=False)
    assert cost(1, 700) <= cost(4, 700) <= cost(8, 700) < 70


def test_a_plain_pass_is_due_now_and_then() -> None:
    cost = disturbed()
    for _ in range(PLAIN_EVERY):
        assert not cost.plain_is_due
        cost.observe(8, 700, 50.0, plain=False)
    assert cost.plain_is_due
    cost.observe(1, 700, 40.0, plain=True)
    assert not cost.plain_is_due
