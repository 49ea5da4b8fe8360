"""What a predicted answer is worth when a file is written anew with small changes: tokens per step, without a model.

    python -m bench.edits [FILE ...] [--model smollm2-135m] [--copies 2] [--json FILE]

Each file is changed in several ways, and each change is an answer whose prediction is the file as it was. `unseen`
prompts name the file alone, `shown` ones hold its text, so that the history can copy too. Nothing that drafts sees the
answer before it is committed. Without files: the sources of this package that have 60 to 250 lines.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

import agentspec
from agentspec.cache.automaton import Int32s
from agentspec.cache.prediction import Prediction, PredictionGuide
from agentspec.commands.simulate import tokenizer_of
from agentspec.config import CacheConfig, Config, ModelConfig
from agentspec.engine.chat import Chat
from agentspec.traces.simulate import ARMS, BUDGETS, Drafting, Recording, Retrieval, Simulated, Written, simulate

PLACES = 3
"""Places of a file that one change touches."""

LINES = 5
"""Most lines at one place."""


class Predicted(Retrieval):
    """The histories with a prediction for each run, by its id."""

    def __init__(self, config: CacheConfig, predictions: Mapping[str, Int32s]) -> None:
        super().__init__(config, None)
        self.predictions = predictions

    def open(self, recording: Recording, prompt: Int32s) -> None:
        super().open(recording, prompt)
        self.current.guides.append(PredictionGuide(Prediction(self.predictions[recording.id])))


def places(lines: Sequence[str], dice: random.Random) -> list[int]:
    """Where a change touches a file, the last place first."""
    return sorted(dice.sample(range(len(lines)), min(PLACES, len(lines))), reverse=True)


def inserted(text: str, other: str, dice: random.Random) -> str:
    """The text with lines of another one between its own."""
    lines, foreign = text.splitlines(keepends=True), other.splitlines(keepends=True)
    for at in places(lines, dice):
        start = dice.randrange(len(foreign))
        lines[at:at] = foreign[start : start + dice.randint(1, LINES)]
    return "".join(lines)


def deleted(text: str, other: str, dice: random.Random) -> str:
    """The text without some of its lines."""
    lines = text.splitlines(keepends=True)
    for at in places(lines, dice):
        del lines[at : at + dice.randint(1, LINES)]
    return "".join(lines)


def replaced(text: str, other: str, dice: random.Random) -> str:
    """The text with lines of another one in place of some of its own."""
    lines, foreign = text.splitlines(keepends=True), other.splitlines(keepends=True)
    for at in places(lines, dice):
        start, count = dice.randrange(len(foreign)), dice.randint(1, LINES)
        lines[at : at + count] = foreign[start : start + count]
    return "".join(lines)


def renamed(text: str, other: str, dice: random.Random) -> str:
    """The text with another name for one of its most frequent ones."""
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", text)).most_common(10)
    return re.sub(rf"\b{dice.choice(names)[0]}\b", "quantity", text)


CHANGES: Mapping[str, Callable[[str, str, random.Random], str]] = {
    "insert": inserted,
    "delete": deleted,
    "replace": replaced,
    "rename": renamed,
}


def recordings(chat: Chat, files: Sequence[Path], copies: int, predictions: dict[str, Int32s]) -> Iterator[Recording]:
    """Each change of each file as a run of one turn; notes the predictions by the runs' ids."""
    texts = [path.read_text() for path in files]
    for number, (path, text) in enumerate(zip(files, texts, strict=True)):
        for name, change in CHANGES.items():
            for copy in range(copies):
                dice = random.Random(f"{number} {name} {copy}")
                answer = written(chat, change(text, texts[number - 1], dice)) + sorted(chat.end_tokens())[:1]
                for way, content in (("unseen", path.name), ("shown", text)):
                    run = f"{path.name} {name} {copy} {way}"
                    predictions[run] = np.array(written(chat, text), np.int32)
                    prompt = np.array(chat.render([{"role": "user", "content": content}], None), np.int32)
                    turns = (Written(0, prompt, np.array(answer, np.int32)),)
                    yield Recording(run, f"{way} {name}", way, run, turns)


def written(chat: Chat, text: str) -> list[int]:
    """Token ids of a text."""
    return list(chat.tokenize(text, special=False))


def own_files() -> list[Path]:
    """Sources of this package of 60 to 250 lines."""
    root = Path(agentspec.__file__).parent
    found = sorted((root / "engine").glob("*.py"))
    return [path for path in found if 60 <= len(path.read_text().splitlines()) <= 250]


def arms(predictions: Mapping[str, Int32s]) -> dict[str, Callable[[], Drafting]]:
    """What is compared; each run gets one of its own, so that no run helps another."""
    return {
        "hybrid": lambda: ARMS["hybrid"](CacheConfig()),
        "prediction": lambda: Predicted(CacheConfig(), predictions),
    }


def table(runs: Sequence[Simulated]) -> dict[str, dict[str, dict[int, float]]]:
    """Tokens per step by change, arm and budget."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for group in sorted({run.source for run in runs}):
        chosen = [run for run in runs if run.source == group]
        tokens = sum(run.tokens for run in chosen)
        found[group] = {
            arm: {
                budget: round(tokens / sum(run.tallies[arm][budget].steps for run in chosen), 3) for budget in BUDGETS
            }
            for arm in chosen[0].tallies
        }
    return found


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and template")
    parser.add_argument("--copies", type=int, default=2, help="of each change of each file")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chat = tokenizer_of(Config(model=ModelConfig(name=arguments.model)))
    predictions: dict[str, Int32s] = {}
    made = recordings(chat, arguments.files or own_files(), arguments.copies, predictions)
    runs = [
        run
        for recording in made
        for run in simulate([recording], {name: make() for name, make in arms(predictions).items()})
    ]
    found = table(runs)
    print(f"{len(runs)} runs, {sum(run.tokens for run in runs):,} tokens")
    print(f"{'':18}" + "".join(f"{arm + ' ' + str(budget):>16}" for arm in arms({}) for budget in BUDGETS))
    for group, rates in found.items():
        print(f"{group:18}" + "".join(f"{rates[arm][budget]:16.2f}" for arm in rates for budget in BUDGETS))
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
