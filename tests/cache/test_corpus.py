"""Static corpora: what is mapped is what was saved, damage is found before kernels read it, drafts name the source."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.automaton import (
    DEGREE,
    FOLLOWED,
    HEAD,
    LENGTH,
    LINK,
    NEXT,
    RECENT,
    SOURCE,
    TARGET,
    TOKEN,
    Int32s,
)
from agentspec.cache.corpus import Builder, Corpus, built, describe, digest_of, load, readable, save
from agentspec.cache.draft import Offer, draft
from agentspec.cache.estimate import CORPUS
from agentspec.cache.history import STRETCH
from agentspec.cache.index import SuffixIndex
from agentspec.errors import StoreError
from agentspec.types import Origin
from tests.full_disk import full_disk

NOTHING = np.empty(0, np.int32)
texts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=60), min_size=1, max_size=4)


def array(tokens: list[int]) -> Int32s:
    return np.array(tokens, np.int32)


def of(documents: list[list[int]]) -> Builder:
    return built((NOTHING, array(document)) for document in documents)


def saved(folder: Path, documents: list[list[int]], name: str = "some.corpus") -> Path:
    path = folder / name
    save(of(documents), "words", path)
    return path


@settings(deadline=None, max_examples=60)
@given(texts, st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 30))
def test_a_mapped_corpus_drafts_what_the_index_in_memory_drafts(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], context: list[int], budget: int
) -> None:
    path = saved(tmp_path_factory.mktemp("corpora"), documents)
    corpus, index = load(path, 6), SuffixIndex()
    for document in documents:
        index.extend(document, index.new_document())
    for count in range(1, len(context) + 1):
        assert corpus.index.count(context[-count:]) == index.count(context[-count:])
    drafts = [draft([Offer(one, kind=CORPUS)], array(context), budget) for one in (corpus.index, index)]
    assert drafts[0] == drafts[1]
    assert set(drafts[0].origin[1:]) <= {Origin.CORPUS}


def test_a_corpus_says_what_it_holds(tmp_path: Path) -> None:
    path = saved(tmp_path, [[1, 2, 3], [4, 5]])
    about = describe(path)
    assert (about.documents, about.tokens, about.tokenizer, about.bytes) == (2, 5, "words", path.stat().st_size)
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.corpus"]


def test_a_beginning_that_is_known_is_not_indexed_again() -> None:
    beginning, more = list(range(STRETCH + 40)), [7, 7, 7]
    corpus = of([beginning, beginning + more])
    assert corpus.tokens == len(beginning) + len(more)
    assert corpus.index.count([*beginning[-3:], *more]) == 1


def test_what_stood_before_a_document_is_its_context() -> None:
    corpus = built([(NOTHING, array([1, 2, 3])), (array([1, 2, 3]), array([9]))])
    assert corpus.index.count([2, 3, 9]) == 1
    assert (corpus.documents, corpus.tokens) == (2, 4)


def test_no_text_is_no_document() -> None:
    corpus = of([[], [1]])
    assert (corpus.documents, corpus.tokens) == (1, 1)


def test_one_token_can_be_saved(tmp_path: Path) -> None:
    assert load(saved(tmp_path, [[3]]), 4).index.count([3]) == 1


def test_a_corpus_is_replaced_while_it_is_mapped(tmp_path: Path) -> None:
    old = load(saved(tmp_path, [[1, 2, 3]]), 9)
    new = load(saved(tmp_path, [[4, 5]]), 9)
    assert (old.index.count([1, 2, 3]), old.index.count([4, 5])) == (1, 0)
    assert (new.index.count([1, 2, 3]), new.index.count([4, 5])) == (0, 1)


def test_a_save_that_fails_leaves_the_old_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, [[1, 2, 3]])

    def full(_: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        saved(tmp_path, [[4, 5]])
    assert load(path, 9).index.count([1, 2, 3]) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.corpus"]


def test_a_full_disk_is_named_and_leaves_the_old_corpus(tmp_path: Path) -> None:
    path = saved(tmp_path, [[1, 2, 3]])
    with full_disk(), pytest.raises(StoreError, match=r"some\.corpus cannot be written: .*"):
        saved(tmp_path, [[4, 5]])
    assert load(path, 9).index.count([1, 2, 3]) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.corpus"]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_processes_share_the_memory_of_a_corpus(tmp_path: Path) -> None:
    path = saved(tmp_path, [np.random.default_rng(1).integers(0, 100, 20_000).tolist()])
    corpus = load(path, 100)
    draft([Offer(corpus.index, kind=CORPUS)], array([1, 2]), 8)
    lines = Path("/proc/self/smaps").read_text().split(str(path))[1].splitlines()
    numbers = dict(line.replace(" kB", "").split(":") for line in lines[1:20])
    assert int(numbers["Private_Dirty"]) == 0 < int(numbers["Rss"])


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01",
    "text": b"some text that is no corpus at all, and long enough",
    "long header": (2**60).to_bytes(8, "little") + b"{}" * 100,
    "no metadata": (2).to_bytes(8, "little") + b"{}",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "deep": (5000).to_bytes(8, "little") + b"[" * 5000,
    "not unicode": (2).to_bytes(8, "little") + b"\xff\xfe",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.corpus"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"other\.corpus is no whole corpus file"):
        load(path, 9)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.corpus", tmp_path):
        with pytest.raises(StoreError, match=path.name):
            describe(path)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damaged_bytes_are_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = saved(tmp_path_factory.getbasetemp(), [[1, 2, 3, 1, 2, 4], [2, 3, 3]], "damaged.corpus")
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    try:
        corpus = load(path, 9)
    except StoreError:
        return
    assert corpus.index.count([1, 2]) == 2, "what is told of a corpus may change, never its arrays"


@pytest.mark.parametrize("cut", [1, 4, 100, 1000])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, cut: int) -> None:
    path = saved(tmp_path, [[1, 2, 3, 1, 2, 4]])
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(StoreError, match="no whole corpus file"):
        load(path, 9)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, [[1, 2]])
    path.write_bytes(path.read_bytes().replace(b'"agentspec_corpus":"1"', b'"agentspec_corpus":"2"'))
    with pytest.raises(StoreError, match="version '2', and '1' is known"):
        load(path, 9)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, [[1, 2, 8]])
    assert load(path, 9).index.count([8]) == 1
    with pytest.raises(StoreError, match="damaged"):
        load(path, 8)


WRONG = {
    "link out of bounds": ("states", LINK, 10_000),
    "link to nowhere": ("states", LINK, -1),
    "link to itself": ("states", LINK, None),
    "negative length": ("states", LENGTH, -4),
    "negative degree": ("states", DEGREE, -1),
    "follower out of bounds": ("states", HEAD, 10_000),
    "follower before all": ("states", HEAD, -7),
    "unknown token": ("states", RECENT, 10_000),
    "edge of no state": ("edges", SOURCE, 10_000),
    "edge to no state": ("edges", TARGET, -2),
    "edge with an unknown token": ("edges", TOKEN, 10_000),
    "edge counted less than never": ("edges", FOLLOWED, -1),
    "edge before itself": ("edges", NEXT, None),
    "next edge out of bounds": ("edges", NEXT, 10_000),
}


@pytest.mark.parametrize(("array_name", "column", "value"), WRONG.values(), ids=WRONG.keys())
def test_arrays_that_kernels_cannot_read_are_refused(
    tmp_path: Path, array_name: str, column: int, value: int | None
) -> None:
    """Also where the digest was made of them."""
    corpus = Builder()
    corpus.index = load(saved(tmp_path, [[1, 2, 3, 1, 2, 4, 1, 5], [2, 3, 3, 6, 1, 7]])).index
    assert readable(corpus.index, 9)
    used = np.flatnonzero(corpus.index.states[:, DEGREE] == 1)
    row = int(used[0]) if array_name == "states" else 2
    getattr(corpus.index, array_name)[row, column] = row if value is None else value
    path = tmp_path / "wrong.corpus"
    save(corpus, "words", path)
    with pytest.raises(StoreError, match=r"wrong\.corpus is damaged"):
        load(path, 9)


def test_a_full_table_is_refused(tmp_path: Path) -> None:
    index = load(saved(tmp_path, [[1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1, 7]])).index
    assert readable(index, 9)
    index.table[:] = 0
    assert not readable(index, 9)
    index.table = np.full(3, -1, np.int32)
    assert not readable(index, 9)


def test_a_header_cannot_point_elsewhere(tmp_path: Path) -> None:
    path = saved(tmp_path, [[1, 2, 3]])
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    changes: list[dict[str, Any]] = [
        {"data_offsets": [-48, 0]},
        {"data_offsets": [10**9, 10**9 + 4]},
        {"data_offsets": ["a", "b"]},
        {"shape": [10**9, 6]},
        {"shape": []},
        {"dtype": "F32"},
    ]
    for change in changes:
        other = json.dumps(header | {"states": header["states"] | change}).encode()
        path.write_bytes(len(other).to_bytes(8, "little") + other + content[8 + length :])
        with pytest.raises(StoreError, match="no whole corpus file"):
            load(path, 9)


def test_digests_tell_arrays_apart() -> None:
    one, other = ({"states": array([1]), "edges": array([2]), "table": array([last])} for last in (3, 4))
    assert digest_of(one) != digest_of(other)


def test_a_corpus_is_an_index_and_what_it_is_of(tmp_path: Path) -> None:
    corpus = load(saved(tmp_path, [[1, 2]]), 9)
    assert isinstance(corpus, Corpus)
    assert corpus.index.tokens == corpus.about.tokens == 2
