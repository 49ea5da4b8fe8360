"""Static corpora: indexes that are built once, saved in a file, and mapped into every process that drafts from them.

A corpus file is a safetensors file with the three arrays of a `SuffixIndex` and what they were made from as metadata.
It is read in place: processes that map the same file share its memory, and what no draft visits is not read again.
"""

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from agentspec.cache.automaton import (
    COUNT,
    DEGREE,
    EDGES,
    FOLLOWED,
    HEAD,
    LENGTH,
    LINK,
    NEXT,
    RECENT,
    SOURCE,
    STATES,
    TARGET,
    TOKEN,
    Int32s,
)
from agentspec.cache.history import STRETCH
from agentspec.cache.index import SuffixIndex
from agentspec.cache.rolling import OVERLAP
from agentspec.errors import StoreError

VERSION = "1"
SUFFIX = ".corpus"
ARRAYS = ("states", "edges", "table")
WIDTH = 6
"""Columns of `states` and of `edges`."""

HEADER = 8
"""Bytes before the header of a safetensors file: its length."""

LONGEST_HEADER = 1 << 20
NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class About:
    """What a corpus was made from, and where its arrays are."""

    tokenizer: str
    """Digest of the vocabulary that its token ids are of."""

    documents: int
    tokens: int
    """Indexed ones: the beginning of a document that an earlier one has too is left out."""

    sha256: str
    bytes: int
    """Of the file."""

    arrays: Mapping[str, tuple[tuple[int, ...], int]]
    """Shape, and place in the file."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """An index that is only read."""

    index: SuffixIndex
    about: About


class Builder:
    """Indexes documents, one after the other."""

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.documents = 0
        self.tokens = 0

    def add(self, document: Int32s, context: Int32s = NO_TOKENS) -> None:
        """Index a document; `context` is what stood before it and is indexed already."""
        if not document.size:
            return
        self.documents += 1
        known = self.index.known_prefix(document)
        skipped = known if known >= STRETCH else 0
        self.tokens += document.size - skipped
        tail = np.concatenate((context, document[:skipped]))[-OVERLAP:]
        if skipped < document.size:
            self.index.extend(np.concatenate((tail, document[skipped:])), self.index.new_document())


def save(built: Builder, tokenizer: str, path: Path) -> None:
    """Write a corpus file, whole or not at all. Raises `StoreError` or `OSError` where that fails."""
    index = built.index
    index.edges[index.sizes[EDGES] :] = -1
    arrays = {
        "states": index.states[: index.sizes[STATES]],
        "edges": index.edges[: max(index.sizes[EDGES], 1)],
        "table": index.table,
    }
    about = {
        "agentspec_corpus": VERSION,
        "tokenizer": tokenizer,
        "documents": str(built.documents),
        "tokens": str(built.tokens),
        "sha256": digest_of(arrays),
    }
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(arrays, part, about)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except SafetensorError as error:
        raise StoreError(f"{path} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def digest_of(arrays: Mapping[str, Int32s]) -> str:
    """A digest of the arrays, in their order."""
    made = hashlib.sha256()
    for name in ARRAYS:
        made.update(np.ascontiguousarray(arrays[name]).data)
    return made.hexdigest()


def describe(path: Path) -> About:
    """What a file says of itself; its arrays are not read. Raises `StoreError` for what is no corpus file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(HEADER), "little")
            if not 0 < length <= min(LONGEST_HEADER, size - HEADER):
                raise ValueError("no header")
            return about_of(json.loads(file.read(length)), HEADER + length, size)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise StoreError(f"{path} is no whole corpus file: {error}") from error


def about_of(header: Mapping[str, Any], start: int, size: int) -> About:
    """The meaning of a header whose arrays begin at `start`. Raises what a malformed one makes Python raise."""
    said = header["__metadata__"]
    if said["agentspec_corpus"] != VERSION:
        raise ValueError(f"it has version {said['agentspec_corpus']!r:.40}, and {VERSION!r} is known")
    arrays = {}
    for name in ARRAYS:
        entry = header[name]
        (first, last), shape = map(int, entry["data_offsets"]), tuple(map(int, entry["shape"]))
        rows, columns = (shape[0], WIDTH) if name != "table" else (shape[0], 1)
        expected = (rows,) if name == "table" else (rows, columns)
        if entry["dtype"] != "I32" or shape != expected or rows <= 0 or last - first != 4 * rows * columns:
            raise ValueError(f"the array {name!r} has another form")
        if first < 0 or start + last > size or (start + first) % 4:
            raise ValueError(f"the array {name!r} is not where the header says")
        arrays[name] = shape, start + first
    return About(said["tokenizer"], int(said["documents"]), int(said["tokens"]), said["sha256"], size, arrays)


def load(path: Path, vocabulary: int = 2**31 - 1) -> Corpus:
    """Map a corpus file whose token ids are below `vocabulary`. Raises `StoreError` where it is damaged.

    All of it is read once for that. The file must not be changed in place while it is mapped; `save` replaces it.
    """
    about = describe(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if len(mapped) != about.bytes:
        raise StoreError(f"{path} was changed while it was opened")
    flat = {name: np.frombuffer(mapped, np.int32, math.prod(shape), at) for name, (shape, at) in about.arrays.items()}
    index = SuffixIndex()
    index.states, index.edges = flat["states"].reshape(-1, WIDTH), flat["edges"].reshape(-1, WIDTH)
    index.table = flat["table"]
    index.sizes[STATES], index.sizes[EDGES], index.tokens = len(index.states), len(index.edges), about.tokens
    index.layout = index.place()
    if digest_of(flat) != about.sha256 or not readable(index, vocabulary):
        raise StoreError(f"{path} is damaged")
    return Corpus(index, about)


def readable(index: SuffixIndex, vocabulary: int) -> bool:
    """Whether kernels can read an index without leaving its arrays and without going round in circles."""
    states, edges, table = index.states, index.edges, index.table
    used = edges[edges[:, SOURCE] >= 0]
    degrees, heads, links = states[:, DEGREE], states[:, HEAD], states[:, LINK]
    several = heads[degrees > 1]
    following = used[:, NEXT][used[:, NEXT] >= 0]
    return bool(
        links[0] == -1
        and within(links[1:], len(states))
        and (states[links[1:], LENGTH] < states[1:, LENGTH]).all()
        and (states[:, [LENGTH, COUNT, DEGREE]] >= 0).all()
        and (heads[degrees == 0] == -1).all()
        and within(heads[degrees == 1], len(states))
        and within(states[:, RECENT][degrees > 0], vocabulary)
        and within(several, len(used))
        and within(used[:, SOURCE], len(states))
        and within(used[:, TARGET], len(states))
        and within(used[:, TOKEN], vocabulary)
        and (used[:, [NEXT, FOLLOWED]] >= (-1, 0)).all()
        and within(following, len(used))
        and np.unique(np.concatenate((following, several))).size == following.size + several.size
        and len(table) & (len(table) - 1) == 0
        and within(table[table >= 0], len(used))
        and (table < 0).any()
    )


def within(numbers: Int32s, end: int) -> bool:
    """Whether all numbers are from 0 and below `end`."""
    return not numbers.size or bool(numbers.min() >= 0 and numbers.max() < end)


def built(documents: Iterable[tuple[Int32s, Int32s]]) -> Builder:
    """The index of documents, each with what stood before it."""
    builder = Builder()
    for context, document in documents:
        builder.add(document, context)
    return builder
