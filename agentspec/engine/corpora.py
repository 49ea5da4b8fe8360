"""Corpora by name: where they are, what they are built from, and loading those that a server drafts from."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from agentspec.cache import corpus
from agentspec.cache.automaton import Int32s
from agentspec.cache.corpus import Corpus
from agentspec.cache.history import common_prefix
from agentspec.cache.tree import CORPORA
from agentspec.config import Config
from agentspec.engine.chat import Chat
from agentspec.errors import ConfigError, StoreError
from agentspec.traces.simulate import Recording

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NO_TOKENS = np.empty(0, np.int32)


def place_of(name: str, home: Path) -> Path:
    """The file of a corpus: below the folder of models for a name, itself for a path that ends in `.corpus`."""
    if name.endswith(corpus.SUFFIX):
        return Path(name).expanduser()
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.100} is no name of a corpus: letters, digits, dots, dashes and underscores are")
    return home / "corpora" / f"{name}{corpus.SUFFIX}"


def vocabulary_of(chat: Chat) -> str:
    """A digest of which token has which id; two models with the same one can share a corpus."""
    tokens = sorted(chat.tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def text_documents(file: Path, chat: Chat) -> Iterator[tuple[Int32s, Int32s]]:
    """A text file as one document. Raises `StoreError` where it is no UTF-8."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StoreError(f"{file} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    yield NO_TOKENS, np.array(chat.tokenize(text, special=False), np.int32)


def run_documents(recording: Recording) -> Iterator[tuple[Int32s, Int32s]]:
    """What the turns of a recorded run add, each with what stood before it."""
    before = NO_TOKENS
    for prompt, answer in recording.prompts():
        whole = np.concatenate((prompt, answer))
        kept = common_prefix(whole, before)
        yield whole[:kept], whole[kept:]
        before = whole


def load_corpora(config: Config, chat: Chat) -> Sequence[Corpus]:
    """The corpora that the settings name. Raises `ConfigError` for one that is missing, twice or another model's, and
    `StoreError` for one that is damaged."""
    names = [name.strip() for name in config.cache.corpora.split(",") if name.strip()]
    if len(names) > CORPORA:
        raise ConfigError(f"AGENTSPEC_CACHE_CORPORA names {len(names)} corpora, at most {CORPORA} can be loaded")
    if len(set(names)) < len(names):
        raise ConfigError(f"AGENTSPEC_CACHE_CORPORA names a corpus twice: {config.cache.corpora!r:.200}")
    vocabulary = vocabulary_of(chat) if names else ""
    return [load_corpus(name, config.model.home, vocabulary, len(chat.tokenizer)) for name in names]


def load_corpus(name: str, home: Path, vocabulary: str, tokens: int) -> Corpus:
    """A corpus for a model whose vocabulary has a digest and so many tokens."""
    file = place_of(name, home)
    if not file.is_file():
        raise ConfigError(f"there is no corpus {name!r:.100}: {file} is no file; build it with: agentspec corpus build")
    if corpus.describe(file).tokenizer != vocabulary:
        raise ConfigError(f"the corpus {name!r:.100} was built for a model with another vocabulary; build it anew")
    return corpus.load(file, tokens)
