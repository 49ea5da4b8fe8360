"""Pages in the memory of a device: one pool for all sequences, allocated once, whose pages have numbers."""

import torch
from torch import Tensor

from agentspec.engine.kv import Page
from agentspec.errors import ConfigError, InternalError
from agentspec.kernels.cpu.attend import PAGE
from agentspec.kernels.triton.batch import PagedCache

SPARE = 2
"""Pages beyond the limit: a measurement at start-up may need them, and a failed request's may leave a little late."""


class DeviceMemory:
    """The pool, and the pages of it that nobody holds: a `PageSource`."""

    def __init__(
        self, layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, limit_bytes: int
    ) -> None:
        """Takes `limit_bytes` of the device's memory, and a little more. Raises `ConfigError` where it is not free."""
        self.layers = layers
        self.heads = heads
        self.dim = dim
        self.token_bytes = 2 * layers * heads * dim * dtype.itemsize
        self.page_bytes = self.token_bytes * PAGE
        pages = limit_bytes // self.page_bytes + SPARE
        try:
            memory = torch.empty(2, layers, pages, PAGE, heads, dim, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"AGENTSPEC_ENGINE_KV_BYTES is {limit_bytes}: {device} has not that much free beside the model"
            ) from None
        self.cache = PagedCache(memory[0], memory[1])
        self._free = list(range(pages - 1, -1, -1))

    @property
    def positions(self) -> int:
        """Positions of all pages within the limit."""
        return (self.cache.keys.shape[1] - SPARE) * PAGE

    def page(self) -> "DevicePage":
        """As `PageSource.page`."""
        if not self._free:
            raise InternalError("no page of the device's memory is free")
        return DevicePage(self, self._free.pop())

    def give_back(self, number: int) -> None:
        """A page's object is gone."""
        self._free.append(number)


class DevicePage(Page):
    """One page of a pool. `address` is its number; `k` and `v` are (layers, kv heads, PAGE, dim), views of the pool."""

    __slots__ = ("memory",)

    def __init__(self, memory: DeviceMemory, number: int) -> None:
        self.memory = memory
        self.address = number
        self.k = memory.cache.keys[:, number].transpose(1, 2)
        self.v = memory.cache.values[:, number].transpose(1, 2)
        self.refs = 1

    def __del__(self) -> None:
        self.memory.give_back(self.address)

    def keys(self, layer: int) -> Tensor:
        """As `Page.keys`."""
        return self.k[layer]

    def write(self, layer: int, to: Tensor, k: Tensor, v: Tensor) -> None:
        """As `Page.write`."""
        self.k[layer][:, to] = k
        self.v[layer][:, to] = v

    def move(self, source: Page, to: Tensor, origin: Tensor) -> None:
        """As `Page.move`."""
        self.k[:, :, to] = source.k[:, :, origin]
        self.v[:, :, to] = source.v[:, :, origin]

    @torch.inference_mode()
    def copy(self, source: Page, tokens: int) -> None:
        """As `Page.copy`."""
        self.k[:, :, :tokens] = source.k[:, :, :tokens]
        self.v[:, :, :tokens] = source.v[:, :, :tokens]
