"""Shared fixtures: a tiny random chat model that every engine test can afford."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.redis_process import redis_server

__all__ = ["redis_server"]


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def user_keeps_their_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cache_home: Path) -> None:
    """Tests leave nothing in the cache of whoever runs them; those of real models read it."""
    if "live" not in request.keywords:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))


TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def run_once(folder: Path) -> None:
    """One pass of a model, which compiles what is not compiled yet."""
    from agentspec.engine.profile import filled_table, pass_seconds
    from agentspec.engine.target import Target

    target = Target.load(folder)
    pass_seconds(target, filled_table(target, 5), 2, 1)


def save_tiny(folder: Path, merges: Sequence[tuple[str, str]] = ()) -> None:
    """A random two-layer Llama with a byte-level tokenizer and a chat template without tools, once run."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    make_tokenizer: Any = PreTrainedTokenizerFast
    tokenizer = make_tokenizer(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|start|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    run_once(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model. Has run a pass: no test's own limit of time pays for compiling."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def merging_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tokenizer that joins letters, and line breaks."""
    folder = tmp_path_factory.mktemp("models") / "merging"
    save_tiny(folder, [("a", "b"), ("ab", "ab"), ("c", "d"), ("b", "c"), ("\u010a", "\u010a")])
    return folder
