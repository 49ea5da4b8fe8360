"""The target model: one pass over the trees and prompt chunks of any number of sequences."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from llvmlite import binding
from torch import Tensor, nn

from agentspec.config import Dtype
from agentspec.engine.attention import Batch, Segment
from agentspec.engine.decoder import compiled_decoder, compiled_forward, head_dim, is_compilable
from agentspec.engine.kv import KVShape, PageSource, PageTable
from agentspec.engine.linear import prepack
from agentspec.engine.rotary import reach
from agentspec.engine.verify import Draw, Verified
from agentspec.engine.weights import load_model
from agentspec.errors import ModelError
from agentspec.kernels.cpu.decoder import Decoder
from agentspec.kernels.cpu.dots import can_quantise

log = logging.getLogger(__name__)


def check_shape(config: Any) -> None:
    """Raises `ModelError` for extents that no decoder has."""
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise ModelError(f"{config.model_type} models are not supported: their configuration has no {name}")
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if config.num_hidden_layers < 1 or heads < 1 or (shared is not None and (shared < 1 or heads % shared)):
        raise ModelError(
            f"a model of {config.num_hidden_layers} layers, {heads} heads and {shared} key and value heads is not whole"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ModelError(f"layers of {', '.join(sorted(kinds))} are not supported")


class AnyTarget(Protocol):
    """A target model, wherever it computes."""

    model: nn.Module
    dtype: Dtype
    window: int
    """Positions of the longest sequence."""

    vocabulary: int

    @property
    def shape(self) -> PageSource: ...

    @property
    def facts(self) -> dict[str, Any]:
        """What the cost of a pass depends on beside the model: the device and the way of computing."""
        ...

    @property
    def exact(self) -> bool:
        """Whether a row's logits have the same bits in any pass, alone or beside others, in a tree or a chain."""
        ...

    def forward(self, segments: Sequence[Segment], keep: Sequence[int]) -> Tensor:
        """Logits (len(keep), vocabulary) of the kept rows, numbered over all segments in order.

        The rows' keys and values lie behind each sequence's committed part until `PageTable.commit`.
        """
        ...

    def verify(self, segments: Sequence[Segment], keep: Sequence[int], draws: Sequence[Draw | None]) -> Verified:
        """`forward`, and the walks of those segments that have a draw, if the target makes any by itself. All rows of
        such a segment's tree, or only the last of its chunk, must be kept."""
        ...


@torch.inference_mode()
def try_out(target: AnyTarget) -> None:
    """One token through the model's own `forward`: raises `ModelError` unless every layer's attention is ours."""
    table = PageTable(target.shape)
    table.reserve(1)
    table.pages[0].k.fill_(float("nan"))
    kind = target.model.config.model_type  # type: ignore[union-attr]
    try:
        target.forward([Segment(table, (0,), (0,), None)], [0])
    except ModelError as error:
        raise ModelError(f"{kind} models: {error.message}") from error
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise ModelError(f"{kind} models cannot be computed here: {error}") from error
    if any(bool(table.keys_and_values(layer, 1)[0].isnan().any()) for layer in range(target.shape.layers)):
        raise ModelError(f"{kind} models do not let their attention be replaced")


class Target:
    """A Hugging Face decoder on the CPU: in compiled passes where its family is known, else in float32 in its own
    `forward` with prepacked linears, our attention and our KV."""

    def __init__(self, model: nn.Module, *, dtype: Dtype = Dtype.FLOAT32, compiled: bool = True) -> None:
        """Takes over `model`, which must have been loaded with `attn_implementation=NAME`.

        `compiled=False` leaves the passes to the model's own `forward` where the compiled decoder knows the model too.
        Where int8 is asked for and cannot be had, the log says so and `self.dtype` is float32. Raises `ModelError`
        for a model that cannot be computed here.
        """
        config: Any = model.config
        check_shape(config)
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.shape = KVShape(config.num_hidden_layers, kv_heads, head_dim(config))
        self.window = reach(config)
        self.vocabulary: int = config.vocab_size
        self.model = model.eval()
        self.decoder: Decoder | None = None
        compiled = compiled and is_compilable(self.model)
        self.dtype = dtype if compiled and can_quantise() else Dtype.FLOAT32
        if self.dtype != dtype:
            why = "this processor multiplies bytes no faster" if compiled else f"not of {config.model_type} models yet"
            log.warning("no 8-bit numbers: %s; computing in float32", why)
        if compiled:
            self.decoder = compiled_decoder(self.model, self.window, torch.get_num_threads(), self.dtype == Dtype.INT8)
        else:
            prepack(self.model)
            try_out(self)

    @property
    def exact(self) -> bool:
        """As `AnyTarget.exact`: true of compiled passes."""
        return self.decoder is not None

    @staticmethod
    def load(folder: Path, dtype: Dtype = Dtype.FLOAT32) -> "Target":
        """The model of a folder with `config.json` and safetensors."""
        return Target(load_model(folder), dtype=dtype)

    @property
    def facts(self) -> dict[str, Any]:
        """As `AnyTarget.facts`."""
        return {
            "processor": binding.get_host_cpu_name(),
            "threads": torch.get_num_threads(),
            "dtype": str(self.dtype),
            "compiled": self.decoder is not None,
        }

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], keep: Sequence[int]) -> Tensor:
        """As `AnyTarget.forward`."""
        for segment in segments:
            segment.table.reserve(segment.table.length + len(segment.tokens))
        if self.decoder is not None:
            return compiled_forward(self.decoder, segments, keep)
        tokens = torch.tensor([token for segment in segments for token in segment.tokens])
        positions = torch.tensor([s.table.length + depth for s in segments for depth in s.depths])
        output = self.model(
            tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.long),
            segments=Batch(segments),
        )
        logits: Tensor = output.logits[0]
        return logits

    def verify(self, segments: Sequence[Segment], keep: Sequence[int], draws: Sequence[Draw | None]) -> Verified:
        """As `AnyTarget.verify`; every walk is left to the host, which has the logits at hand."""
        return Verified(self.forward(segments, keep), (None,) * len(segments))
