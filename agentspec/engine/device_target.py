"""The target model on a device: passes through the kernels of `kernels.triton`, or their twins, in fixed buffers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentspec.config import Dtype
from agentspec.engine.attention import Manner, Segment
from agentspec.engine.decoder import head_dim
from agentspec.engine.device_choice import choices, walks_of
from agentspec.engine.device_inputs import Extent, Inputs, exact_extent, is_tree, rounded_extent
from agentspec.engine.device_kv import DeviceMemory
from agentspec.engine.graphs import Graphs
from agentspec.engine.rotary import reach
from agentspec.engine.target import check_shape, try_out
from agentspec.engine.verify import Draw, Verified
from agentspec.engine.weights import load_model
from agentspec.errors import ModelError
from agentspec.kernels.triton.batch import DIMS, PagedCache, TreeBatch
from agentspec.kernels.triton.blocks import BlockTable
from agentspec.kernels.triton.kv_moves import append, compact
from agentspec.kernels.triton.tree_attention import attend
from agentspec.kernels.triton.tree_walk import choose, walk

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}

MOST_ROWS = 512
"""Rows of the largest pass that gets buffers to keep; larger ones have work enough to hide the host's."""


class DeviceRows:
    """The rows of a pass as a model's layers meet them: `attention.Attending`."""

    def __init__(self, batch: TreeBatch, cache: PagedCache, blocks: BlockTable | None) -> None:
        self.batch = batch
        self.cache = cache
        self.blocks = blocks

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, manner: Manner) -> Tensor:
        """As `Attending.attend`."""
        append(k.transpose(0, 1), v.transpose(0, 1), self.cache, layer, self.batch)
        return attend(
            q.transpose(0, 1), self.cache, layer, self.batch,
            manner.scaling, manner.window, manner.softcap, self.blocks,
        )  # fmt: skip


class Pass:
    """The buffers of passes of one size, and the work on them: logits, and the walks of greedy requests."""

    def __init__(self, inputs: Inputs, logits: Tensor, compute: Callable[[], Tensor], settle: Callable[[], Tensor]):
        """`compute` fills `logits`; `settle` walks by them and moves what is accepted."""
        self.inputs = inputs
        self.logits = logits
        self.compute = compute
        self.settle = settle

    def record(self, graphs: Graphs) -> None:
        """Make graphs of the work. The inputs must be filled: they are computed on the way, and nothing moves."""
        self.inputs.walked.zero_()
        self.compute = graphs.recorded(self.compute)
        self.settle = graphs.recorded(self.settle)
        self.inputs.send()


class DeviceTarget:
    """A Hugging Face decoder in its own `forward`, with our attention over pages in the device's memory."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        kv_bytes: int,
        *,
        blocks: BlockTable | None = None,
        graphs: bool = True,
    ) -> None:
        """Takes over `model`, which must have been loaded with `attn_implementation=NAME`, in the type of its weights.

        `kv_bytes` of the device's memory are taken for keys and values. Block sizes are picked from `blocks` where
        given. Raises `ModelError` for a model that cannot be computed here.
        """
        config: Any = model.config
        check_shape(config)
        dim = head_dim(config)
        if dim not in DIMS:
            raise ModelError(
                f"{config.model_type} models with heads of {dim} features are not supported on a GPU: "
                f"heads may have {', '.join(map(str, DIMS))}"
            )
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.device = device
        self.model = model.to(device).eval()
        weights = next(model.parameters()).dtype
        self.dtype = next(dtype for dtype, kind in TORCH_DTYPES.items() if kind == weights)
        self.shape = DeviceMemory(config.num_hidden_layers, heads, dim, weights, device, kv_bytes)
        self.window = reach(config)
        self.vocabulary: int = config.vocab_size
        self.blocks = blocks
        self.graphs = Graphs(device, graphs)
        self.passes: dict[Extent, Pass] = {}
        """Buffers that are kept, by their room."""

        self._logits = torch.empty(MOST_ROWS, self.vocabulary, device=device)
        self._no_mask = torch.zeros(1, 1, 1, 1, device=device)
        try_out(self)

    @staticmethod
    def load(folder: Path, device: torch.device, kv_bytes: int, dtype: Dtype, home: Path) -> "DeviceTarget":
        """The model of a folder with `config.json` and safetensors; block sizes are kept in AgentSpec's `home`.

        Raises `ModelError` as the constructor does and where the model does not fit into memory, `ConfigError` where
        keys and values do not.
        """
        model = load_model(folder, TORCH_DTYPES[dtype])
        blocks = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                blocks = BlockTable.of_this_gpu(home)
        try:
            return DeviceTarget(model, device, kv_bytes, blocks=blocks)
        except torch.OutOfMemoryError:
            raise ModelError(f"the model in {folder} does not fit into the memory of {device}") from None

    @property
    def facts(self) -> dict[str, Any]:
        """As `AnyTarget.facts`."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return {"processor": name, "dtype": str(self.dtype), "graphs": self.graphs.enabled}

    @property
    def exact(self) -> bool:
        """As `AnyTarget.exact`: sums on a GPU depend on what else is in the pass."""
        return False

    def forward(self, segments: Sequence[Segment], keep: Sequence[int]) -> Tensor:
        """As `AnyTarget.forward`; float32 on the device, valid until the next pass."""
        return self.verify(segments, keep, [None] * len(segments)).logits

    @torch.inference_mode()
    def verify(self, segments: Sequence[Segment], keep: Sequence[int], draws: Sequence[Draw | None]) -> Verified:
        """As `AnyTarget.verify`: all walks that have a draw, with one small tensor read by the host."""
        for segment in segments:
            segment.table.reserve(segment.table.length + len(segment.tokens))
        with self._current():
            made = self._filled_pass(segments, keep, [draw is not None for draw in draws])
            logits = made.compute()[: len(keep)]
            walked = [draw for draw in draws if draw is not None]
            if not walked:
                return Verified(logits, (None,) * len(segments))
            if all(draw.sampling.temperature == 0 for draw in walked):
                outcome = made.settle()
            else:
                firsts = made.inputs.first_scored(len(segments))
                outcome = self._settled(choices(made.logits, segments, draws, firsts), made.inputs)
            return Verified(logits, walks_of(outcome.tolist(), segments, draws))

    def _current(self) -> AbstractContextManager[Any]:
        """Makes the device the current one of this thread, as Triton launches there."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _filled_pass(self, segments: Sequence[Segment], keep: Sequence[int], walked: Sequence[bool]) -> Pass:
        """Buffers that hold these segments. Those of passes that verify trees are kept; a pass with a prompt's chunk,
        or a very large one, gets its own."""
        exact = exact_extent(segments)
        is_kept = exact.rows <= MOST_ROWS and len(keep) == exact.rows and all(map(is_tree, segments))
        extent = rounded_extent(exact) if is_kept else exact
        made = self.passes.get(extent) if is_kept else None
        is_new = made is None
        made = made or self._new_pass(extent, range(extent.rows) if is_kept else keep, is_kept)
        made.inputs.fill(segments, walked, self.vocabulary)
        if is_kept and is_new:
            made.record(self.graphs)
            self.passes[extent] = made
        return made

    def _new_pass(self, extent: Extent, keep: Sequence[int], is_kept: bool) -> Pass:
        inputs = Inputs(extent, keep, self.device)
        logits = self._logits[: len(keep)] if is_kept else self._logits.new_empty(len(keep), self.vocabulary)
        return Pass(
            inputs,
            logits,
            lambda: logits.copy_(self._computed(inputs)),
            lambda: self._settled(choose(logits), inputs),
        )

    def _computed(self, inputs: Inputs) -> Tensor:
        """Logits (choices, vocabulary) of the scored rows."""
        rows = DeviceRows(inputs.batch, self.shape.cache, self.blocks)
        output = self.model(
            inputs.token.long().unsqueeze(0),
            attention_mask=self._no_mask,
            position_ids=inputs.position.long().unsqueeze(0),
            use_cache=False,
            logits_to_keep=inputs.batch.scored,
            segments=rows,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _settled(self, choice: Tensor, inputs: Inputs) -> Tensor:
        """The outcome of the walk by these choices; what is accepted lies behind the committed positions then."""
        outcome = walk(choice, inputs.token, inputs.batch)
        outcome[:, 0] *= inputs.walked
        compact(self.shape.cache, inputs.batch, outcome)
        return outcome
