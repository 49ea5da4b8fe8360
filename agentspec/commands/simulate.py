"""`agentspec replay --simulate`: how many tokens a step histories alone would have made, without a model."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentspec.commands.models import pulled
from agentspec.config import Config

if TYPE_CHECKING:
    from agentspec.cache.automaton import Int32s
    from agentspec.engine.chat import Chat
    from agentspec.traces.schema import Trace
    from agentspec.traces.simulate import Encode


def run_simulation(
    traces: "Sequence[Trace]", config: Config, turns: int | None, command: str, *, as_json: bool
) -> None:
    """Simulates the first `turns` turns of each trace, or all, and prints the report."""
    from rich.console import Console

    from agentspec.commands.display import turn_progress
    from agentspec.traces.gain import print_simulation, simulation_report
    from agentspec.traces.simulate import ARMS, BUDGETS, recording_of, simulate

    chat = tokenizer_of(config)
    encode, scaffold = encoder(chat), scaffolder(chat, config.cache.scaffold_tokens)
    total = sum(len(list(trace.turns())[:turns]) for trace in traces)
    with turn_progress() as progress:
        runs = simulate(
            (recording_of(trace, encode, turns, scaffold) for trace in traces),
            {name: make(config.cache) for name, make in ARMS.items()},
            progress=lambda done: progress(done, total),
        )
    settings = {"model": config.model.name, "budgets": BUDGETS, "turns": turns}
    report = simulation_report(runs, settings, command)
    if as_json:
        print(json.dumps(report))
    else:
        console = Console()
        print_simulation(report, console if console.is_terminal else Console(width=200))


def tokenizer_of(config: Config) -> "Chat":
    """The configured model's tokenizer and template; a folder needs no weights."""
    from agentspec.engine.chat import Chat

    folder = Path(config.model.name).expanduser()
    return Chat.load(folder if folder.is_dir() else pulled(config.model.name, config))


def encoder(chat: "Chat") -> "Encode":
    """Turns in tokens as a server would make and see them."""
    from agentspec.traces.simulate import with_reasoning

    return lambda turn: (
        chat.render(turn.prompt, turn.trace.tools),
        chat.answer(turn.prompt, with_reasoning(turn.trace.messages[turn.index]), turn.trace.tools),
    )


def scaffolder(chat: "Chat", most: int) -> "Callable[[Trace], list[Int32s]]":
    """The scaffold of a run's tools, of at most so many tokens."""
    from agentspec.engine.outline import documents
    from agentspec.types import Outline

    return lambda trace: documents(chat, Outline(tuple(trace.tools)), most) if trace.tools else []
