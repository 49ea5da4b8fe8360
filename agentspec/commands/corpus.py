"""`agentspec corpus`: building, listing and checking static corpora."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentspec.commands.models import pulled
from agentspec.commands.settings import add_settings, chosen_config
from agentspec.commands.simulate import encoder
from agentspec.errors import StoreError

if TYPE_CHECKING:
    from agentspec.cache.automaton import Int32s
    from agentspec.engine.chat import Chat
    from agentspec.engine.wheels import Progress

ABOUT = """A corpus is an index of texts and recorded runs, built once, from which a server drafts besides the histories
of its own runs: 'agentspec serve --corpora NAME'. It belongs to a model's vocabulary. All tenants of the server draft
from it, so it should hold nothing that one of them must not learn of."""

ABOUT_BUILD = """Indexes .jsonl and .jsonl.gz files as trace files (docs/format/trace.md; 'agentspec traces import'
makes them of others), and any other file as one text in UTF-8. A corpus of the same name is replaced."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("corpus", help="build, list and check static corpora to draft from", description=ABOUT)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    building = actions.add_parser("build", help="index texts and recorded runs", description=ABOUT_BUILD)
    listing = actions.add_parser("list", help="corpora that are here, their documents, tokens and bytes")
    checking = actions.add_parser("verify", help="read corpora whole and say whether they are damaged")
    building.add_argument("name", metavar="NAME", help="name of the corpus, or a path that ends in .corpus")
    building.add_argument("files", nargs="+", type=Path, metavar="FILE", help="trace file, or text file")
    checking.add_argument("names", nargs="+", metavar="NAME", help="name of a corpus, or a path that ends in .corpus")
    add_settings(building, "model.name")
    for action, run in ((building, run_build), (listing, run_list), (checking, run_verify)):
        add_settings(action, "model.home")
        action.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        action.set_defaults(run=run)


def run_build(arguments: argparse.Namespace) -> None:
    """Builds a corpus file."""
    from agentspec.cache.corpus import built, save
    from agentspec.commands.display import model_progress
    from agentspec.engine.chat import Chat
    from agentspec.engine.corpora import place_of, vocabulary_of

    config = chosen_config(arguments)
    target = place_of(arguments.name, config.model.home)
    if target.exists() and not target.is_file():
        raise StoreError(f"{target} is no plain file, and would be replaced")
    check_files(arguments.files)
    folder = Path(config.model.name).expanduser()
    chat = Chat.load(folder if folder.is_dir() else pulled(config.model.name, config))
    with model_progress() as progress:
        index = built(documents(arguments.files, chat, progress))
    if not index.tokens:
        raise StoreError("there is nothing in these files to draft from")
    target.parent.mkdir(parents=True, exist_ok=True)
    save(index, vocabulary_of(chat), target)
    report = {"corpus": arguments.name, **row_of(target)}
    print(json.dumps(report) if arguments.json else described(report))


def check_files(files: Sequence[Path]) -> None:
    """Raises `StoreError` before any work for a file that is not there."""
    for file in files:
        if not file.is_file():
            raise StoreError(f"{file} is no file")


def documents(files: Sequence[Path], chat: "Chat", progress: "Progress") -> "Iterator[tuple[Int32s, Int32s]]":
    """What files hold, each document with what stood before it."""
    from agentspec.engine.corpora import run_documents, text_documents
    from agentspec.traces.files import read_traces
    from agentspec.traces.simulate import recording_of

    encode = encoder(chat)
    for file in files:
        progress(f"index {file.name}", 0, 1)
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            for trace in read_traces([file]):
                yield from run_documents(recording_of(trace, encode))
        else:
            yield from text_documents(file, chat)
        progress(f"index {file.name}", 1, 1)


def row_of(file: Path) -> dict[str, Any]:
    """What a corpus file says of itself."""
    from agentspec.cache.corpus import describe

    about = describe(file)
    return {"documents": about.documents, "tokens": about.tokens, "bytes": about.bytes, "file": str(file)}


def described(row: dict[str, Any]) -> str:
    """A line on a corpus."""
    counts = ", ".join(f"{row[what]:,} {what}" for what in ("documents", "tokens", "bytes"))
    return f"{row['corpus']}: {counts}, {row['file']}"


def run_list(arguments: argparse.Namespace) -> int:
    """Prints a line for each corpus file below the folder; 1 where one is none."""
    from agentspec.cache.corpus import SUFFIX

    folder = chosen_config(arguments).model.home / "corpora"
    rows, wrong = [], []
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            rows.append({"corpus": file.name.removesuffix(SUFFIX), **row_of(file)})
        except StoreError as error:
            wrong.append(error.message)
    if arguments.json:
        print(json.dumps({"corpora": rows, "problems": wrong}))
    else:
        for line in [*map(described, rows), *wrong]:
            print(line)
        if not rows and not wrong:
            print(f"there are no corpora in {folder}")
    return int(bool(wrong))


def run_verify(arguments: argparse.Namespace) -> int:
    """Reads corpora whole; 1 where one is damaged."""
    from agentspec.cache.corpus import load
    from agentspec.engine.corpora import place_of

    home = chosen_config(arguments).model.home
    problems = {}
    for name in arguments.names:
        try:
            load(place_of(name, home))
        except StoreError as error:
            problems[name] = error.message
    if arguments.json:
        print(json.dumps({"checked": len(arguments.names), "problems": problems}))
    else:
        for name in arguments.names:
            print(problems.get(name, f"{name}: nothing is damaged"))
    return int(bool(problems))
