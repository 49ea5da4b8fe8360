"""Turns a GGUF file into a folder of float32 safetensors with its tokenizer and chat template."""

import contextlib
import io
import json
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from agentspec.engine.gguf_settings import restore
from agentspec.engine.weights import listed
from agentspec.errors import ModelError

PROBE = "def f(x):\n    return {'a': [x, 1234]}  # naïve 中文 🙂\n\n\t<b>done</b>"


def convert_gguf(path: Path, folder: Path) -> None:
    """Writes config, tokenizer and float32 weights of the GGUF file at `path` into `folder`."""
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            model = read_model(path)
        except ModelError:
            raise
        except Exception as error:  # whatever a broken or foreign file makes the libraries raise
            raise ModelError(f"{path}: cannot be read as a GGUF model: {error}") from error
        repair_pre_tokenizer(tokenizer, path)
        check_tokenizer(tokenizer, path)
        save_model(model, tokenizer, folder, path)


def read_model(path: Path) -> Any:
    """The model of a GGUF file: its weights unpacked to float32, its configuration completed."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model, report = loaded
    check_tensors(model, report["missing_keys"], path)
    restore(model.config, path)
    return model


def check_tensors(model: Any, missing: Collection[str], path: Path) -> None:
    """Refuses a file that lacks weights, which would be random, or whose biases the reader passes over."""
    if missing:
        raise ModelError(f"{path}: the file lacks {listed(sorted(missing))}")
    stored = sum(tensor.name.endswith(".bias") for tensor in gguf.GGUFReader(path).tensors)
    read = sum(name.endswith(".bias") for name in model.state_dict())
    if stored != read:
        raise ModelError(f"{path}: the file has {stored} biases, of which {model.config.model_type} models know {read}")


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, source: Path) -> None:
    """Everything that serving needs of a model that was read from `source`."""
    try:
        save_weights(model, folder / "model.safetensors", source)
        config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        save_config(config, tokenizer.eos_token_id, folder)
        save_tokenizer(tokenizer, folder)
    except (ModelError, OSError):
        raise
    except Exception as error:  # libraries in other languages have their own errors for a full disk
        raise ModelError(f"{folder}: the converted model cannot be written: {error}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the libraries' own warnings and bars off the terminal while a model is read."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)


def save_weights(model: Any, target: Path, source: Path) -> None:
    """Every parameter in float32; of tied weights only the first name."""
    tensors: dict[str, torch.Tensor] = {}
    stored: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in stored:
            continue
        stored.add(tensor.data_ptr())
        tensors[name] = tensor.detach().to(torch.float32).contiguous()
        if not torch.isfinite(tensors[name]).all():
            raise ModelError(f"{source}: weight {name} holds values that are not finite; the file is damaged")
    save_file(tensors, target, metadata={"format": "pt"})


def save_config(config: dict[str, Any], end_of_turn: int, folder: Path) -> None:
    """The architecture without traces of quantisation, and the tokens that end a turn."""
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    ends = config.get("eos_token_id")
    known = [] if ends is None else ends if isinstance(ends, list) else [ends]
    all_ends = list(dict.fromkeys([end_of_turn, *known]))
    config["eos_token_id"] = all_ends[0] if len(all_ends) == 1 else all_ends
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The tokenizer with its chat template inside `tokenizer_config.json`."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "name_or_path"):
        content.pop(key, None)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def repair_pre_tokenizer(tokenizer: Any, path: Path) -> None:
    """Restores the splitting of digits that SmolLM was trained with and that transformers' GGUF reader drops.

    Without it `   12` starts with two spaces and a spaced digit instead of three spaces.
    """
    field = gguf.GGUFReader(path).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """A served model needs a chat template, one token that ends a turn, and text that survives the round trip."""
    if not tokenizer.chat_template:
        raise ModelError(f"{path}: the file has no chat template; an instruct model is needed")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{path}: the file names no end-of-turn token")
    for token in tokenizer.all_special_tokens:
        if tokenizer.encode(token, add_special_tokens=False) != [token_id(tokenizer, token)]:
            raise ModelError(f"{path}: special token {token!r} is not one token")
    if decode(tokenizer, tokenizer.encode(PROBE, add_special_tokens=False)) != PROBE:
        raise ModelError(f"{path}: the tokenizer changes text that it encodes and decodes")


def token_id(tokenizer: Any, token: str) -> int:
    """Id of a token by its text."""
    return int(tokenizer.convert_tokens_to_ids(token))


def decode(tokenizer: Any, ids: Any) -> str:
    """Text of token ids, byte for byte."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
