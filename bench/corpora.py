"""Tokens per step without a model: histories alone, and with a static corpus of the same source or of the others.

    python -m bench.corpora trajectories.jsonl.gz [more ...]
    PYTHONPATH=.:FOLDER python -m bench.corpora trajectories.jsonl.gz [more ...] --arctic

With `--arctic`, FOLDER holds `arctic_inference` as for `bench.arctic`, and its suffix decoding stands beside ours:
alone, and with the other sources' answers in its tree of outputs.

A corpus holds runs whose task's hash is even, of all files but the one that is drafted for (`others`) or of that file
alone (`same`); what is drafted for are the runs whose task's hash is odd. `warm` is a server whose histories have the
runs before, `cold` one that has nothing but the run's own.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.corpus import About, Builder, Corpus, built
from agentspec.commands.simulate import encoder, tokenizer_of
from agentspec.config import CacheConfig, Config, ModelConfig
from agentspec.engine.corpora import run_documents
from agentspec.traces.files import read_traces
from agentspec.traces.gain import counts, interval, redraws
from agentspec.traces.simulate import BUDGETS, Drafting, Encode, Recording, Retrieval, Simulated, recording_of, simulate
from bench.arctic import Arctic

COLD = frozenset({"trajectory", "corpus"})
SETTING = 8.0, 0.1
"""Arctic's factor and least probability: the best of those that `bench.arctic` tries, on nearly all sources."""

Known = Mapping[Path, Sequence[Recording]]


def recordings(file: Path, encode: Encode, most: int, *, even: bool) -> Iterator[Recording]:
    """Runs of one half of the tasks, until their answers have `most` tokens."""
    answered = 0
    for trace in read_traces([file]):
        if answered >= most:
            break
        group = trace.group or trace.id
        if (hashlib.sha256(group.encode()).digest()[0] % 2 == 0) == even:
            recording = recording_of(trace, encode)
            answered += sum(turn.answer.size for turn in recording.turns)
            yield recording


def drafting(corpus: Builder | None, sources: frozenset[str] | None) -> Retrieval:
    """The histories with a corpus."""
    found = Retrieval(CacheConfig(), sources)
    if corpus is not None:
        about = About("", corpus.documents, corpus.tokens, "", 0, {})
        found.histories.corpora = [Corpus(corpus.index, about)]
    return found


def arctic(answers: Iterable[Int32s]) -> Arctic:
    """Arctic's suffix decoding, after some answers."""
    found = Arctic(*SETTING)
    for answer in answers:
        found.open(None, answer[:1])  # type: ignore[arg-type]
        found.observe(answer[1:])
        found.close()
    return found


def simulated(file: Path, known: Known, encode: Encode, most: int, *, beside: bool) -> list[Simulated]:
    """The runs of a file with every corpus; `beside`: and Arctic's."""
    documents = {name: [document for run in runs for document in run_documents(run)] for name, runs in known.items()}
    start = time.perf_counter()
    same = built(documents[file])
    others = built(document for other, found in documents.items() if other != file for document in found)
    seconds = time.perf_counter() - start
    tokens = max(same.tokens + others.tokens, 1)
    size = same.index.bytes + others.index.bytes
    print(
        f"{file.name}: corpora of {same.tokens:,} and {others.tokens:,} tokens, {seconds / tokens * 1e6:.2f} "
        f"microseconds and {size / tokens:.0f} bytes a token",
        file=sys.stderr,
    )
    arms: dict[str, Drafting] = {
        f"{kind}{name}": drafting(corpus, sources)
        for kind, sources in (("warm", None), ("cold", COLD))
        for name, corpus in (("", None), ("+same", same), ("+others", others))
    }
    if beside:
        outside = [turn.answer for other, runs in known.items() if other != file for run in runs for turn in run.turns]
        arms |= {"arctic": arctic([]), "arctic+others": arctic(outside)}
    return simulate(recordings(file, encode, most, even=False), arms)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and template")
    parser.add_argument("--tokens", type=int, default=8000, help="of answers drafted for, a file")
    parser.add_argument("--corpus-tokens", type=int, default=20000, help="of answers in a corpus, a file")
    parser.add_argument("--arctic", action="store_true", help="put Arctic's suffix decoding beside ours")
    arguments = parser.parse_args()
    encode = encoder(tokenizer_of(Config(model=ModelConfig(name=arguments.model))))
    known = {file: list(recordings(file, encode, arguments.corpus_tokens, even=True)) for file in arguments.files}
    simulate_all = partial(simulated, known=known, encode=encode, most=arguments.tokens, beside=arguments.arctic)
    runs = [run for file in arguments.files for run in simulate_all(file)]
    for budget in BUDGETS:
        table([run for run in runs if run.tokens], budget)


def table(runs: Sequence[Simulated], budget: int) -> None:
    """Tokens per step by source, and the gain of each corpus over none and over Arctic's, with 95 % bootstrap
    intervals and the mean over the sources."""
    arms = list(runs[0].tallies)
    print(f"\n{budget} nodes\n{'':18}{'runs':>6}" + "".join(f"{arm:>14}" for arm in arms))
    sources = sorted({run.source for run in runs})
    for source in (*sources, None):
        chosen = [run for run in runs if source in (run.source, None)]
        counted = [counts(chosen, arm, budget).sum(axis=0) for arm in arms]
        rates = "".join(f"{tokens / steps:14.3f}" for tokens, steps, *_ in counted)
        print(f"{source or 'all':18}{len(chosen):6}{rates}")
    pairs = [(arm, arm.partition("+")[0]) for arm in arms if "+" in arm]
    pairs += [("warm" + arm.removeprefix("arctic"), arm) for arm in arms if arm.startswith("arctic")]
    pairs += [("warm+others", arm) for arm in arms if arm == "arctic"]
    for arm, other in pairs:
        gains = [gain([run for run in runs if run.source == name], arm, other, budget) for name in sources]
        drawn, mine, theirs = redraws(len(runs)), counts(runs, arm, budget), counts(runs, other, budget)
        low, high = interval((drawn @ theirs)[:, 1] / (drawn @ mine)[:, 1])
        print(
            f"{arm} over {other}: {gain(runs, arm, other, budget):.3f} ({low:.3f} to {high:.3f}), mean of sources "
            f"{np.mean(gains):.3f}, least {min(gains):.3f}"
        )


def gain(runs: Sequence[Simulated], arm: str, other: str, budget: int) -> float:
    """Tokens per step of one arm over those of another."""
    return float(counts(runs, other, budget)[:, 1].sum() / counts(runs, arm, budget)[:, 1].sum())


if __name__ == "__main__":
    main()
