"""Checks the kernels of the GPU worker against their twins, compares decoding with and without drafts, by the kernels
alone and by the worker's own engine, and measures.

    python -m bench.gpu_check [--output gpu_check.json] [--no-graphs]
    python -m bench.gpu_check --interpret     only the checks, at small sizes, in Triton's interpreter on the CPU

Block sizes are timed and kept as the worker would. Writes one JSON file; the exit status is 0 when every check held, 1
when one failed, 2 without a GPU.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentspec.config import load
from agentspec.kernels.triton.blocks import Blocks, BlockTable
from agentspec.kernels.triton.kv_moves import append, append_reference, compact, compact_reference
from agentspec.kernels.triton.top_k import top_k, top_k_reference
from agentspec.kernels.triton.tree_attention import attend, attend_reference
from agentspec.kernels.triton.tree_walk import choose, choose_reference, walk, walk_reference
from bench.gpu_cases import CASES, LONG, TOLERANCE, Case, chain, fill, tokens_for, twin_cache
from bench.gpu_model import TINY, Sizes, decode, make_decoder, no_draft, prompts_of, right_draft, wrong_draft

MODEL = Sizes(4, 512, 8, 2, 64, 1024, 4096)
"""The decoder of the comparison on a GPU, in float32."""

SMALL = ("length 17", "3 heads on one, dim 64", "bfloat16, dim 64", "window 1", "nothing")
"""Cases that the interpreter is given."""

Check = dict[str, Any]


def verdict(kernel: str, case: str, error: float, tolerance: float) -> Check:
    """A check's entry."""
    return {"kernel": kernel, "case": case, "max_error": error, "tolerance": tolerance, "ok": error <= tolerance}


def largest_difference(got: Tensor, expected: Tensor) -> float:
    """Infinite where one is NaN and the other is not."""
    if got.numel() == 0:
        return 0.0
    far = (got.double() - expected.double()).abs()
    far = torch.where(got.isnan() & expected.isnan() | (got == expected), 0.0, far)
    return float(far.nan_to_num(torch.inf).max())


def check_attention(case: Case, device: str) -> Iterator[Check]:
    """Whole and in parts."""
    made = fill(case, device)
    for layer in range(2):
        append_reference(made.k, made.v, made.cache, layer, made.batch)
    scaling = case.dim**-0.5
    expected = attend_reference(made.q, made.cache, 1, made.batch, scaling, case.window, case.softcap)
    got = attend(made.q, made.cache, 1, made.batch, scaling, case.window, case.softcap)
    tolerance = TOLERANCE[case.dtype]
    yield verdict("tree attention", case.name, largest_difference(got, expected), tolerance)
    if not any(case.segments):
        return
    from agentspec.kernels.triton.tree_attention_triton import launch

    parts = Blocks(16, 16, 32 if max(case.lengths) < 1024 else 512)
    got = launch(made.q, made.cache, 1, made.batch, scaling, case.window or 0, case.softcap or 0.0, parts)
    yield verdict("tree attention in parts", case.name, largest_difference(got, expected), tolerance)


def check_moves(case: Case, device: str) -> Iterator[Check]:
    """Append, then compaction of random paths."""
    made = fill(case, device)
    twin = twin_cache(made.cache)
    for layer in range(2):
        append(made.k, made.v, made.cache, layer, made.batch)
        append_reference(made.k, made.v, twin, layer, made.batch)
    yield verdict("append", case.name, largest_difference(made.cache.keys, twin.keys), 0.0)
    token, choice = drawn_walk(case, random.Random(3), device)
    outcome = walk_reference(choice, token, made.batch)
    compact(made.cache, made.batch, outcome)
    compact_reference(twin, made.batch, outcome)
    far = max(largest_difference(made.cache.keys, twin.keys), largest_difference(made.cache.values, twin.values))
    yield verdict("compaction", case.name, far, 0.0)
    got = walk(choice, token, made.batch)
    yield verdict("walk", case.name, largest_difference(got, outcome), 0.0)


def drawn_walk(case: Case, dice: random.Random, device: str) -> tuple[Tensor, Tensor]:
    """Tokens of the rows, and choices that often follow them down the tree."""
    token: list[int] = []
    choice: list[int] = []
    for part in case.segments:
        parents = chain(part) if isinstance(part, int) else part
        tokens = tokens_for(parents, dice, 300)
        token += tokens
        if isinstance(part, int):
            choice += [dice.randrange(300)] * min(part, 1)
            continue
        child = {parent: node for node, parent in enumerate(parents)}
        choice += [tokens[child[node]] if node in child and dice.random() < 0.95 else 0 for node in range(len(parents))]
    made = (torch.tensor(values, dtype=torch.int32, device=device) for values in (token, choice))
    return next(made), next(made)


def check_vocabulary(vocabulary: int, rows: int, device: str) -> Iterator[Check]:
    """Choices, draws, and the likeliest tokens."""
    noise = torch.Generator().manual_seed(1)
    for dtype in TOLERANCE:
        name = f"{vocabulary} tokens, {str(dtype).removeprefix('torch.')}"
        logits = torch.randn(rows, vocabulary, generator=noise).mul(2).to(device, dtype)
        yield verdict("argmax", name, largest_difference(choose(logits), choose_reference(logits)), 0.0)
        values, ids = top_k(logits, 8)
        expected, its = top_k_reference(logits, 8)
        yield verdict("top-k ids", name, largest_difference(ids, its), 0.0)
        yield verdict("top-k log-probabilities", name, largest_difference(values, expected), 1e-4)
    weights = logits.double().softmax(-1)
    uniform = torch.rand(rows, dtype=torch.float64, generator=noise).to(device)
    got, expected = choose(weights, uniform), choose_reference(weights, uniform)
    yield verdict("inverse CDF", f"{vocabulary} tokens", largest_difference(got, expected), 0.0)


def check_kernels(device: str, small: bool) -> list[Check]:
    """Every kernel against its twin."""
    checks: list[Check] = []
    for case in [case for case in CASES if case.name in SMALL] if small else [*CASES, LONG]:
        checks += check_attention(case, device)
        checks += check_moves(case, device)
    checks += check_vocabulary(5000 if small else 151936, 3 if small else 64, device)
    return checks


def check_decoding(device: str, small: bool) -> list[Check]:
    """Greedy and seeded decoding: the same tokens whatever is drafted."""
    sizes, count = (TINY, 4) if small else (MODEL, 96)
    model = make_decoder(sizes, device, torch.float32)
    prompts = prompts_of(sizes.vocabulary)[: 2 if small else 3]
    checks = []
    for seed in (None, 7):
        plain = decode(model, prompts, count, no_draft, device, seed)
        drafters = {"right drafts": right_draft(plain.sequences, 6, sizes.vocabulary)}
        if seed is None or not small:
            drafters["wrong drafts"] = wrong_draft(sizes.vocabulary, 4 if small else 64)
        for name, drafter in drafters.items():
            made = decode(model, prompts, count, drafter, device, seed)
            wrong = sum(
                one != other
                for mine, its in zip(made.sequences, plain.sequences, strict=True)
                for one, other in zip(mine, its, strict=True)
            )
            check = verdict("greedy decoding" if seed is None else "seeded decoding", name, wrong, 0)
            figures = {"steps": made.steps, "steps_plain": plain.steps, "smallest_gap": plain.smallest_gap}
            checks.append(check | figures)
    return checks


def check_engine(device: str, small: bool, graphs: bool) -> list[Check]:
    """The worker's step loop: the same tokens whatever is drafted and whatever runs beside."""
    from bench.gpu_engine import engine_checks  # it imports Triton, which reads its environment then

    return [
        verdict(way, drafts, wrong, 0) | figures for way, drafts, wrong, figures in engine_checks(device, small, graphs)
    ]


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    import triton

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All parts, for the file."""
    device = "cpu" if options.interpret else "cuda"
    document: dict[str, Any] = {"device": platform.processor() or platform.machine(), "versions": versions()}
    document["interpreted"] = options.interpret
    seconds: dict[str, float] = {}

    def timed(name: str, part: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        made = part()
        seconds[name] = round(time.perf_counter() - start, 1)
        return made

    checks = timed("kernels", lambda: check_kernels(device, options.interpret))
    checks += timed("decoding", lambda: check_decoding(device, options.interpret))
    checks += timed("engine", lambda: check_engine(device, options.interpret, not options.no_graphs))
    for check in checks:
        print(f"{'ok  ' if check['ok'] else 'FAIL'} {check['kernel']:24} {check['case']:32} {check['max_error']:.3g}")
    document |= {"ok": all(check["ok"] for check in checks), "checks": checks, "seconds": seconds}
    if not options.interpret:
        from bench.gpu_engine import engine_timings
        from bench.gpu_timings import timings

        table = BlockTable.of_this_gpu(load().model.home)
        document["device"] = torch.cuda.get_device_name()
        document["timings"] = timed("timings", lambda: timings(table, not options.no_graphs))
        document["engine"] = timed("engine timings", lambda: engine_timings(table, not options.no_graphs))
    return document


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="the file to write")
    made.add_argument("--interpret", action="store_true", help="on the CPU, in Triton's interpreter, without timings")
    made.add_argument("--no-graphs", action="store_true", help="no passes as CUDA graphs")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, write."""
    options = parser().parse_args(arguments)
    if not options.interpret and not torch.cuda.is_available():
        print(
            "gpu_check needs a CUDA device and found none; --interpret checks the kernels on the CPU", file=sys.stderr
        )
        return 2
    if importlib.util.find_spec("triton") is None:
        print("gpu_check needs triton: .venv/bin/pip install -c constraints.txt -e '.[gpu]'", file=sys.stderr)
        return 2
    os.environ["TRITON_INTERPRET"] = "1" if options.interpret else "0"
    document = run(options)
    options.output.write_text(json.dumps(document, indent=1))
    failed = [check for check in document["checks"] if not check["ok"]]
    print(f"{len(document['checks'])} checks, {len(failed)} failed; written to {options.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
