"""The converted SmolLM2 in the model cache, if it was pulled."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.config import load
from agentspec.engine.models import ready, repair

NAME = "smollm2-135m"

pytestmark = pytest.mark.live


@pytest.fixture
def folder() -> Path:
    found = ready(NAME, load().model.home)
    if found is None:
        pytest.skip(f"needs: agentspec models pull {NAME}")
    return found


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_files_are_what_was_written(folder: Path) -> None:
    assert repair(NAME, load().model.home) == []
    assert folder.is_dir()


def test_turn_ends_with_the_end_token_of_the_configuration(folder: Path, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.endswith("<|im_start|>assistant\nHello.<|im_end|>\n")
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(end) == "<|im_end|>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == end


@pytest.mark.parametrize(
    "text", ["   12", "a  1", "naïve 中文 🙂\n\n\tx", "<|im_start|>user\n<|im_end|>", "x = {'a': [1]}"]
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_digits_stand_alone_as_in_training(tokenizer: Any) -> None:
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("a   1234")]
    assert pieces == ["a", "   ", "1", "2", "3", "4"]


def test_weights_are_float32_and_tied_ones_stored_once(folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
        assert {str(weights.get_slice(name).get_dtype()) for name in names} == {"F32"}
