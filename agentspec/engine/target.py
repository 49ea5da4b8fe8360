"""The target model: one pass over the trees and prompt chunks of any number of sequences."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentspec.config import Dtype
from agentspec.engine.attention import NAME, Segment
from agentspec.engine.decoder import compiled_decoder, compiled_forward, head_dim, is_compilable, window_of
from agentspec.engine.kv import KVShape
from agentspec.engine.linear import prepack
from agentspec.errors import ModelError
from agentspec.kernels.cpu.decoder import Decoder
from agentspec.kernels.cpu.dots import can_quantise

log = logging.getLogger(__name__)


def quiet_transformers() -> None:
    """Leave progress and log lines to AgentSpec."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def refuse_unknown_attention(config: Any) -> None:
    """Raises `ModelError` for attention that `tree_attention` would compute wrongly."""
    windows = any(window_of(config, layer) for layer in range(config.num_hidden_layers))
    if windows or getattr(config, "attn_logit_softcapping", None):
        kind = "a sliding window" if windows else "capped logits"
        raise ModelError(f"models of type {config.model_type} with {kind} in their attention are not supported yet")


class Target:
    """A Hugging Face decoder on the CPU: in compiled passes where its family is known, else in float32 in its own
    `forward` with prepacked linears, our attention and our KV."""

    def __init__(self, model: nn.Module, *, dtype: Dtype = Dtype.FLOAT32, compiled: bool = True) -> None:
        """Takes over `model`, which must have been loaded with `attn_implementation=NAME`.

        `compiled=False` leaves the passes to the model's own `forward` where the compiled decoder knows the model too.
        Where int8 is asked for and cannot be had, the log says so and `self.dtype` is float32.
        """
        config: Any = model.config
        self.shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, head_dim(config))
        self.window: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        self.model = model.eval()
        self.decoder: Decoder | None = None
        compiled = compiled and is_compilable(self.model)
        self.dtype = dtype if compiled and can_quantise() else Dtype.FLOAT32
        if self.dtype != dtype:
            why = "this processor multiplies bytes no faster" if compiled else f"not of {config.model_type} models yet"
            log.warning("no 8-bit numbers: %s; computing in float32", why)
        if compiled:
            self.decoder = compiled_decoder(self.model, torch.get_num_threads(), self.dtype == Dtype.INT8)
        else:
            refuse_unknown_attention(config)
            prepack(self.model)

    @staticmethod
    def load(folder: Path, dtype: Dtype = Dtype.FLOAT32) -> "Target":
        """The model of a folder with `config.json` and safetensors."""
        quiet_transformers()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=NAME, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot load a model from {folder}: {error}") from error
        return Target(model, dtype=dtype)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], keep: Sequence[int]) -> Tensor:
        """Logits (len(keep), vocabulary) of the kept rows, numbered over all segments in order.

        The rows' keys and values lie behind each slab's committed part until `Slab.commit`.
        """
        for segment in segments:
            segment.slab.reserve(segment.slab.length + len(segment.tokens))
        if self.decoder is not None:
            return compiled_forward(self.decoder, segments, keep)
        tokens = torch.tensor([token for segment in segments for token in segment.tokens])
        positions = torch.tensor([s.slab.length + depth for s in segments for depth in s.depths])
        output = self.model(
            tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.long),
            segments=segments,
        )
        logits: Tensor = output.logits[0]
        return logits
