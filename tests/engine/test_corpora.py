"""Corpora by name: a served model drafts from them whatever the tenant, and never says anything else for it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache.corpus import built, load, save
from agentspec.cache.retrieval import Histories
from agentspec.cache.tree import CORPORA
from agentspec.config import CacheConfig, Config, ModelConfig
from agentspec.engine.chat import Chat
from agentspec.engine.corpora import load_corpora, place_of, run_documents, text_documents, vocabulary_of
from agentspec.engine.service import Engine
from agentspec.errors import ConfigError, StoreError
from agentspec.policies.cost import FixedCost
from agentspec.traces.schema import Turn, parse_trace
from agentspec.traces.simulate import recording_of
from agentspec.types import GenerationRequest, Report, SamplingParams, Scope, SpeculationParams, Trajectory

PROMPT = [{"role": "user", "content": "xyz"}]


def config(folder: Path, home: Path, corpora: str = "") -> Config:
    return Config(model=ModelConfig(name=str(folder), home=home), cache=CacheConfig(corpora=corpora))


async def answered(engine: Engine, name: str, **fields: Any) -> Report:
    prompt = engine.render(PROMPT, None)
    request = GenerationRequest(prompt, Trajectory(name, Scope(name, "tiny")), 40, **fields)
    async for delta in engine.generate(request):
        if delta.report is not None:
            return delta.report
    raise AssertionError


def replies(folder: Path, home: Path, corpora: str, *wanted: dict[str, Any]) -> list[Report]:
    """Answers to the same prompt, each of another tenant."""

    async def body() -> list[Report]:
        engine = Engine.from_folder(config(folder, home, corpora), folder, Histories(CacheConfig()))
        engine.loop.cost = FixedCost()
        try:
            return [await answered(engine, f"tenant{at}", **fields) for at, fields in enumerate(wanted)]
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(body(), 60))


def accepted(report: Report, source: str = "corpus") -> int:
    return sum(count for names, count in report.accepted.items() if source in names.split("+"))


def test_a_corpus_drafts_for_every_tenant_and_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    sampled = {"sampling": SamplingParams(temperature=0.8, seed=3)}
    before = replies(tiny_model, tmp_path, "", {}, sampled)
    chat = Chat.load(tiny_model)
    tokens = chat.render(PROMPT, None), *(report.token_ids for report in before)
    path = tmp_path / "corpora" / "answers.corpus"
    path.parent.mkdir()
    documents = [(np.array(tokens[0], np.int32), np.array(answer, np.int32)) for answer in tokens[1:]]
    save(built(documents), vocabulary_of(chat), path)
    off = {"speculation": SpeculationParams(drafters=("trajectory",))}
    after = replies(tiny_model, tmp_path, "answers", {}, sampled, {}, off)
    assert [report.token_ids for report in after[:2]] == [report.token_ids for report in before]
    assert accepted(after[0]) > 20
    assert accepted(after[1]) > 0
    assert accepted(after[2]) > 20
    assert accepted(after[3]) == 0
    assert after[3].token_ids == before[0].token_ids
    assert after[0].steps < before[0].steps


def test_what_is_wrong_with_a_name_is_said(tiny_model: Path, merging_model: Path, tmp_path: Path) -> None:
    chat, other = Chat.load(tiny_model), Chat.load(merging_model)
    (tmp_path / "corpora").mkdir()
    for name, tokenizer in (("good", vocabulary_of(chat)), ("other", vocabulary_of(other))):
        save(built(text_documents(text_file(tmp_path), chat)), tokenizer, place_of(name, tmp_path))
    whole = place_of("good", tmp_path).read_bytes()
    place_of("cut", tmp_path).write_bytes(whole[:-8])
    place_of("torn", tmp_path).write_bytes(whole[:-8] + b"\0" * 8)
    assert len(load_corpora(config(tiny_model, tmp_path, " good, "), chat)) == 1
    assert load_corpora(config(tiny_model, tmp_path, str(place_of("good", tmp_path))), chat)
    for names, error, said in (
        ("none", ConfigError, "there is no corpus 'none'"),
        ("good,good", ConfigError, "twice"),
        ("../good", ConfigError, "is no name of a corpus"),
        ("a\0b", ConfigError, "is no name of a corpus"),
        ("other", ConfigError, "another vocabulary"),
        ("cut", StoreError, "no whole corpus file"),
        ("torn", StoreError, "damaged"),
        (",".join(f"a{at}" for at in range(CORPORA + 1)), ConfigError, f"at most {CORPORA}"),
    ):
        with pytest.raises(error, match=said):
            load_corpora(config(tiny_model, tmp_path, names), chat)


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("abcabc xyz")
    return path


def test_a_text_is_one_document(tiny_model: Path, tmp_path: Path) -> None:
    chat = Chat.load(tiny_model)
    ((context, tokens),) = text_documents(text_file(tmp_path), chat)
    assert (context.size, tuple(tokens)) == (0, chat.tokenize("abcabc xyz", special=False))
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    with pytest.raises(StoreError, match="bytes is no text in UTF-8: invalid start byte at byte 3"):
        list(text_documents(tmp_path / "bytes", chat))


def test_the_turns_of_a_run_follow_each_other(tiny_model: Path) -> None:
    chat = Chat.load(tiny_model)
    said = [("user", "abc"), ("assistant", "xyz"), ("user", "more"), ("assistant", "end")]
    messages = [{"role": role, "content": content} for role, content in said]
    trace = parse_trace({"id": "a", "source": "demo", "domain": "swe", "messages": messages})

    def encode(turn: Turn) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return chat.render(turn.prompt, None), chat.answer(turn.prompt, turn.trace.messages[turn.index], None)

    found = list(run_documents(recording_of(trace, encode)))
    wholes = [[*context, *new] for context, new in found]
    assert wholes == [[*map(int, sum(encode(turn), ()))] for turn in trace.turns()]
    corpus = built(found)
    assert corpus.index.count(wholes[1][-20:]) == 1
    assert corpus.tokens == sum(new.size for _, new in found)


def test_two_models_with_the_same_vocabulary_share_a_corpus(tiny_model: Path, merging_model: Path) -> None:
    assert vocabulary_of(Chat.load(tiny_model)) == vocabulary_of(Chat.load(tiny_model))
    assert vocabulary_of(Chat.load(tiny_model)) != vocabulary_of(Chat.load(merging_model))


def test_a_loaded_corpus_knows_its_file(tiny_model: Path, tmp_path: Path) -> None:
    chat = Chat.load(tiny_model)
    path = tmp_path / "x.corpus"
    save(built(text_documents(text_file(tmp_path), chat)), vocabulary_of(chat), path)
    assert load(path).about.documents == 1
