"""A decoder on the CPU: its packed weights, its threads, and its passes."""

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.kernels.cpu.attend import CHUNK, PAGE, TOGETHER
from agentspec.kernels.cpu.lanes import BYTES, LANES
from agentspec.kernels.cpu.passes import lead, serve
from agentspec.kernels.cpu.product import aligned, pack
from agentspec.kernels.cpu.quantised import pack_quantised, row_bytes
from agentspec.kernels.cpu.records import CALL, LAYER, MODEL, PAGES, PARENTS, SEGMENT_FIELDS
from agentspec.kernels.cpu.team import SYNC_WORDS

Floats = NDArray[np.float32]

WRITE_ENDS: set[int] = set()
"""The pipes that this process wakes its helping threads through."""


def leave_to_parent() -> None:
    """In a forked process: threads wait until the last write end of their pipe is closed, and this one's are copies."""
    for pipe in WRITE_ENDS:
        os.close(pipe)
    WRITE_ENDS.clear()


os.register_at_fork(after_in_child=leave_to_parent)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block's weights, (outputs, inputs); None for what it lacks."""

    norm: Floats
    qkv: Floats
    """Query, key and value projections, one below the other."""

    output: Floats
    mlp_norm: Floats
    """Before the MLP."""

    gate: Floats
    up: Floats
    down: Floats
    qkv_bias: Floats | None = None
    output_bias: Floats | None = None
    gate_bias: Floats | None = None
    up_bias: Floats | None = None
    down_bias: Floats | None = None
    query_norm: Floats | None = None
    key_norm: Floats | None = None
    output_norm: Floats | None = None
    """Of what attention adds to the rows."""

    down_norm: Floats | None = None
    """Of what the MLP adds to the rows."""

    window: int = 0
    """Positions that a row sees, itself included; 0 for all."""

    rotary: tuple[Floats, Floats] | None = None
    """Cosines and sines by which positions turn queries and keys, (positions, `Shape.rotary` / 2) each; None where they
    do not."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Extents of a decoder; `dim`, of one head, is a multiple of `LANES`."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    """How many of a head's first numbers positions turn."""

    inner: int
    vocabulary: int
    positions: int
    """How many there are."""

    epsilon: float
    scaling: float
    """What queries are multiplied with."""

    embedding_scale: float = 1.0
    """What embeddings are multiplied with."""

    gelu: bool = False
    """Whether the MLP's gate is a gelu, approximated by a tanh, in place of a silu."""

    score_cap: float = 0.0
    logit_cap: float = 0.0
    """Soft caps of attention's scores and of logits: a value becomes cap * tanh(value / cap); 0 for none."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's rows of a pass, and the addresses of the pages where its keys and values lie: as `attend` says,
    keys of all layers and heads before the values, with room for the rows behind the cached positions."""

    tokens: Sequence[int]
    depths: Sequence[int]
    parents: Sequence[int] | None
    """None for a chain."""

    length: int
    pages: Sequence[int]


class Decoder:
    """Computes passes on packed copies of a model's weights. One thread calls it; `threads - 1` others help."""

    def __init__(
        self,
        shape: Shape,
        embedding: Floats,
        head: Floats | None,
        norm: Floats,
        threads: int,
        *,
        quantised: bool = False,
    ) -> None:
        """`head` is None where it is the embedding's own; `quantised` rounds the matrices to 8 bits."""
        self.shape = shape
        self.threads = threads
        self.quantised = quantised
        self._pack = pack_quantised if quantised else pack
        self._width = whole(shape.hidden)
        self._alive: list[Any] = []
        self._layers: list[tuple[int, ...]] = []
        self._room: dict[str, NDArray[np.uint8]] = {}
        self._call = np.zeros(1, CALL)
        self._call["sync"] = self._keep(np.zeros(SYNC_WORDS, np.int64))
        self._bytes = self._keep(np.ones(threads, np.uint8))
        packed = self._keep(self._pack(embedding if head is None else head))
        apart = head is not None
        rows = self._keep((self._pack(embedding) if quantised else embedding) if apart else None) or packed
        self._model = np.zeros(1, MODEL)
        self._model[0] = (
            shape.hidden,
            self._width,
            shape.heads,
            shape.kv_heads,
            shape.dim,
            shape.rotary,
            shape.inner,
            shape.vocabulary,
            0,
            rows,
            1 if apart else LANES,
            int(quantised),
            int(shape.gelu),
            self._keep(norm),
            packed,
            1 / shape.hidden,
            shape.epsilon,
            1 / shape.dim,
            shape.scaling,
            shape.embedding_scale,
            shape.score_cap,
            shape.logit_cap,
        )

    def add_layer(self, weights: LayerWeights) -> None:
        """Take over the next block's weights."""
        bias = None
        if weights.gate_bias is not None and weights.up_bias is not None:
            bias = in_turns(padded(weights.gate_bias), padded(weights.up_bias))
        cosine, sine = weights.rotary or (None, None)
        self._layers.append(
            (
                self._keep(weights.norm),
                self._keep(self._pack(weights.qkv)),
                self._keep(weights.qkv_bias),
                self._keep(weights.query_norm),
                self._keep(weights.key_norm),
                self._keep(self._pack(weights.output)),
                self._keep(weights.output_bias),
                self._keep(weights.output_norm),
                self._keep(weights.mlp_norm),
                self._keep(in_turns(self._pack(weights.gate), self._pack(weights.up))),
                self._keep(bias),
                self._keep(self._pack(weights.down)),
                self._keep(weights.down_bias),
                self._keep(weights.down_norm),
                weights.window,
                self._keep(cosine),
                self._keep(sine),
            )
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that weights and rotary tables take."""
        return sum(int(array.nbytes) for array in self._alive)

    def start(self) -> None:
        """All blocks are there: start the helping threads. They end with the decoder."""
        self._model["layers"] = len(self._layers)
        self._records = np.array(self._layers, LAYER)
        helpers: list[threading.Thread] = []
        reading, self._pipe = os.pipe()
        for thread in range(1, self.threads):
            arguments = (reading, self._alive, thread, self.threads, self._model, self._records, self._call)
            helper = threading.Thread(target=help_out, args=arguments, name=f"decoder-{thread}", daemon=True)
            helper.start()
            helpers.append(helper)
        WRITE_ENDS.add(self._pipe)
        self._process = os.getpid()
        weakref.finalize(self, dismiss, self._process, self._pipe, reading, helpers)

    def forward(self, segments: Sequence[Rows], keep: Sequence[int]) -> Floats:
        """Logits (len(keep), vocabulary) of the kept rows, numbered over all segments in order.

        Writes each row's key and value behind the cached ones of its sequence. Raises `IndexError`, and computes
        nothing, for a token, a position, a kept row or a parent that there is not, and for rows without room;
        `RuntimeError` in a forked process, which has no helping threads.
        """
        if os.getpid() != self._process:
            raise RuntimeError("a decoder computes only in the process that started it")
        rows = sum(len(segment.tokens) for segment in segments)
        logits = np.empty((len(keep), whole(self.shape.vocabulary)), np.float32)
        words = self._describe(segments, keep, rows)
        self._reserve(rows, max(segment.length + len(segment.tokens) for segment in segments))
        call = self._call
        call["rows"], call["kept"], call["segments"] = rows, len(keep), len(segments)
        call["logits"] = logits.ctypes.data
        lead(self._pipe, self._bytes, self.threads, self._model, self._records, call)
        del words
        return logits[:, : self.shape.vocabulary]

    def _describe(self, segments: Sequence[Rows], keep: Sequence[int], rows: int) -> NDArray[np.int64]:
        """The pass's input as one array, whose parts `call` points at."""
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        lists: list[int] = []
        records = np.zeros((len(segments), SEGMENT_FIELDS), np.int64)
        for number, segment in enumerate(segments):
            count = len(segment.tokens)
            records[number, :3] = len(tokens), count, segment.length
            records[number, PAGES] = len(lists)
            lists += segment.pages
            records[number, PARENTS] = -1 if segment.parents is None else len(lists)
            lists += segment.parents or ()
            tokens += segment.tokens
            positions += [segment.length + depth for depth in segment.depths]
            owners += [number] * count
        self._check(segments, tokens, positions, keep)
        claims = [0] * len(self._layers)
        words = np.array([*tokens, *positions, *owners, *keep, *lists, *claims, *[0] * records.size], np.int64)
        starts = np.cumsum([0, rows, rows, rows, len(keep), len(lists), len(claims)]) * 8 + words.ctypes.data
        for name, start in zip(("tokens", "positions", "owners", "keep", "", "claims", "segment"), starts, strict=True):
            if name:
                self._call[name] = start
        records[:, PAGES] = records[:, PAGES] * 8 + starts[4]
        links = records[:, PARENTS]
        records[:, PARENTS] = np.where(links < 0, 0, links * 8 + starts[4])
        words[len(words) - records.size :] = records.reshape(-1)
        return words

    def _check(
        self, segments: Sequence[Rows], tokens: Sequence[int], positions: Sequence[int], keep: Sequence[int]
    ) -> None:
        """Nothing outside the memory of this pass may be read or written, whatever the caller does."""
        if not tokens:
            raise IndexError("a pass needs rows")
        if min(tokens) < 0 or max(tokens) >= self.shape.vocabulary:
            raise IndexError(f"tokens are below {self.shape.vocabulary}, got {min(tokens)} to {max(tokens)}")
        if len(positions) != len(tokens) or min(positions) < 0 or max(positions) >= self.shape.positions:
            raise IndexError(f"every token has a position below {self.shape.positions}, got up to {max(positions)}")
        if len(keep) > len(tokens) or any(not 0 <= row < len(tokens) for row in keep):
            raise IndexError(f"kept rows are among the {len(tokens)} of the pass")
        for segment in segments:
            if segment.length + len(segment.tokens) > len(segment.pages) * PAGE:
                raise IndexError(f"no room for {len(segment.tokens)} rows behind {segment.length} positions")
            parents = segment.parents
            if parents is not None and not all(-1 <= parent < row for row, parent in enumerate(parents)):
                raise IndexError("a row's parent is before it")
            if parents is not None and len(parents) != len(segment.tokens):
                raise IndexError("every row has a parent or -1")

    def _reserve(self, rows: int, positions: int) -> None:
        """Memory that a pass works in: grown where it is too small."""
        shape, call = self.shape, self._call
        groups = shape.heads // shape.kv_heads
        together = max(TOGETHER, groups)
        chunks = -(-positions // CHUNK)
        score_stride = (CHUNK + whole(rows) + 3 * LANES) * 4
        widest = max(shape.hidden, shape.inner, shape.heads * shape.dim)
        path_bytes = whole(2 * rows) * 4
        own_sums_bytes = whole(together * (2 * shape.dim + 4)) * 4
        head_bytes = rows * shape.heads * shape.dim * 4
        quantised_bytes = whole(rows * row_bytes(widest)) if self.quantised else 0
        sizes = {
            "x": rows * self._width * 4,
            "qkv": rows * (shape.heads + 2 * shape.kv_heads) * shape.dim * 4,
            "queries": head_bytes,
            "attended": head_bytes,
            "inner": rows * whole(shape.inner) * 4,
            "normed": self.threads * rows * self._width * 4,
            "products": rows * self._width * 4,
            "quantised": self.threads * quantised_bytes,
            "tiles": self.threads * 2 * rows * BYTES,
            "scores": self.threads * together * score_stride,
            "paths": self.threads * path_bytes,
            "sums": head_bytes * chunks,
            "tops": rows * shape.heads * chunks * 4,
            "totals": rows * shape.heads * chunks * 4,
            "own_sums": self.threads * own_sums_bytes,
        }
        call["score_stride"], call["path_bytes"], call["chunks"] = score_stride, path_bytes, chunks
        call["own_sums_bytes"], call["quantised_bytes"] = own_sums_bytes, quantised_bytes
        for name, size in sizes.items():
            if name not in self._room or len(self._room[name]) < size:
                self._room[name] = aligned((size // 4,)).view(np.uint8)
                call[name] = self._room[name].ctypes.data

    def _keep(self, array: NDArray[Any] | None) -> int:
        """The address of an array, which stays alive; 0 of none. Vectors are filled up with zeros."""
        if array is None:
            return 0
        vector = array.ndim == 1 and array.dtype == np.float32
        kept: Any = padded(array) if vector else np.ascontiguousarray(array)
        self._alive.append(kept)
        return int(kept.ctypes.data)


def whole(size: int) -> int:
    """The multiple of `LANES` that holds `size`."""
    return -(-size // LANES) * LANES


def padded(vector: Floats | None) -> Floats | None:
    """A vector filled up with zeros to whole lanes; None of none."""
    if vector is None:
        return None
    result = aligned((whole(len(vector)),))
    result[: len(vector)] = vector
    return result


def in_turns(first: Floats | None, second: Floats | None) -> Floats | None:
    """The panels of two packed matrices of one shape, or the lanes of two biases, one of each in turns."""
    if first is None or second is None:
        return None
    shape = (-1, LANES) if first.ndim == 1 else first.shape
    pair = np.stack([first.reshape(shape), second.reshape(shape)], 1)
    result = aligned(pair.shape)
    result[:] = pair
    return result.reshape(-1) if first.ndim == 1 else result


def help_out(reading: int, alive: list[Any], *arguments: Any) -> None:
    """A helping thread's life: passes until the pipe is closed. `alive` holds what the addresses belong to."""
    buffer = np.zeros(8, np.uint8)
    serve(reading, buffer.ctypes.data, *arguments)


def dismiss(process: int, pipe: int, reading: int, helpers: list[threading.Thread]) -> None:
    """End the helping threads, before the interpreter ends: a thread that came back later would abort the process."""
    if os.getpid() != process:
        return
    WRITE_ENDS.discard(pipe)
    os.close(pipe)
    for helper in helpers:
        if helper is not threading.current_thread():
            helper.join()
    os.close(reading)
