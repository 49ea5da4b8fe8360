"""Compiles every kernel for GPUs that need not be there: `python -m tests.kernels.triton.compiled`.

Launches go the whole way but for the loading of the machine code: its shared memory is held against the GPU's instead.
Prints a line for each kernel.
"""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget

from agentspec.kernels.triton.tree_attention import candidates, default_blocks
from bench.gpu_cases import Case, chain, fill, random_tree

SHARED = {89: 99 * 1024, 90: 227 * 1024}
"""Bytes by compute capability: a consumer card of 2022, and an H100."""


class Code:
    """What a driver tells of a device, and does with machine code."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[device]}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        print(f"{name}: {len(code)} bytes, {shared} bytes of shared memory", flush=True)
        return 1, 1, 0, 0, 1024


class Driver:
    """Of a GPU that is not there: what would be launched is not."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.utils = Code()

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None


def compile_attention(case: Case) -> None:
    """Whole and in parts."""
    from agentspec.kernels.triton.tree_attention_triton import launch

    made = fill(case, "cpu")
    blocks = default_blocks(made.q, made.cache, made.batch)
    choices = {blocks, *candidates(made.q, made.cache, made.batch)} if case.name == "all" else {blocks}
    for choice in choices:
        try:
            launch(made.q, made.cache, 0, made.batch, 1.0, case.window or 0, case.softcap or 0.0, choice)
        except triton.runtime.errors.OutOfResources:
            assert choice != blocks, f"the default does not fit: {case}"


def compile_others() -> None:
    """Everything but attention."""
    from agentspec.kernels.triton.kv_moves_triton import launch_append, launch_compact
    from agentspec.kernels.triton.top_k_triton import launch_top_k
    from agentspec.kernels.triton.tree_walk_triton import launch_choose, launch_walk

    made = fill(Case("", (random_tree(40), chain(3)), (50, 9), dim=96), "cpu")
    launch_append(made.k, made.v, made.cache, 0, made.batch)
    for kind in (torch.float32, torch.bfloat16):
        logits = torch.zeros(43, 9000, dtype=kind)
        choice = launch_choose(logits, None)
        launch_choose(logits, torch.zeros(43, dtype=torch.float64))
        launch_top_k(logits, 8)
    launch_compact(made.cache, made.batch, launch_walk(choice, choice, made.batch))


def main() -> None:
    """For each GPU."""
    for capability in SHARED:
        triton.runtime.driver.set_active(Driver(capability))
        for dim in (64, 96, 128, 256):
            for kind in (torch.float32, torch.bfloat16):
                compile_attention(Case("", (random_tree(40), chain(3)), (50, 9), 4, 2, dim, dtype=kind))
        manner = {"window": 20, "softcap": 9.0, "dtype": torch.bfloat16}
        compile_attention(Case("all", (random_tree(40), 30), (2000, 9), 14, 2, 128, **manner))  # type: ignore[arg-type]
        compile_others()


if __name__ == "__main__":
    main()
