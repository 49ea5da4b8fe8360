"""The measurement of predictions: changes are what they say, and nothing drafts from what is still to come."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.config import CacheConfig
from agentspec.engine.chat import Chat
from agentspec.traces.simulate import Nodes, Recording, Written, simulate
from bench.edits import CHANGES, Predicted, arms, recordings, table

TEXT = "".join(f"line {number} of the file\n" for number in range(40))
OTHER = "".join(f"another {number}\n" for number in range(40))


def changed(name: str) -> list[str]:
    return CHANGES[name](TEXT, OTHER, random.Random(1)).splitlines()


def test_changes_are_what_they_say() -> None:
    lines = TEXT.splitlines()
    inserted = changed("insert")
    assert [line for line in inserted if not line.startswith("another")] == lines and len(inserted) > len(lines)
    assert set(changed("delete")) < set(lines)
    replaced = changed("replace")
    assert any(line.startswith("another") for line in replaced) and len(set(lines) - set(replaced)) > 0
    renamed = changed("rename")
    assert len(renamed) == len(lines) and all("quantity" in line for line in renamed)


class Watched(Predicted):
    """Writes down what was proposed after how many tokens."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.size, self.proposals = 0, dict[int, Nodes]()

    def propose(self, budget: int) -> Nodes:
        nodes = super().propose(budget)
        self.proposals[self.size] = nodes
        return nodes

    def observe(self, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
        self.size += tokens.size
        super().observe(tokens)


def test_no_draft_knows_what_is_still_to_come() -> None:
    dice = random.Random(2)
    predicted = np.array([dice.randrange(6) for _ in range(80)], np.int32)
    seen = []
    for ending in (predicted[40:], predicted[:40]):
        answer = np.concatenate((predicted[:20], predicted[25:40], ending))
        watched = Watched(CacheConfig(), {"run": predicted})
        turns = (Written(0, np.array([9, 9], np.int32), answer),)
        simulate([Recording("run", "s", "d", "g", turns)], {"watched": watched}, (8,))
        seen.append({size: nodes for size, nodes in watched.proposals.items() if size <= 35})
    sizes = seen[0].keys() & seen[1].keys()
    assert len(sizes) > 3
    assert all(seen[0][size] == seen[1][size] for size in sizes)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "one.py", tmp_path / "two.py"]
    for path, text in zip(made, (TEXT, OTHER), strict=True):
        path.write_text(text[:300])
    return made


def test_a_prediction_saves_steps_where_the_file_is_not_shown(tiny_model: Path, files: list[Path]) -> None:
    predictions: dict[str, Any] = {}
    made = recordings(Chat.load(tiny_model), files, 1, predictions)
    runs = [run for one in made for run in simulate([one], {name: make() for name, make in arms(predictions).items()})]
    assert len(runs) == len(predictions) == 16
    found = table(runs)
    assert set(found) == {f"{way} {name}" for way in ("shown", "unseen") for name in CHANGES}
    assert found["unseen delete"]["prediction"][16] > 1.5 * found["unseen delete"]["hybrid"][16]
