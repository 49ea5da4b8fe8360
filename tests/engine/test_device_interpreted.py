"""The target on a device with the kernels themselves, in Triton's interpreter: as with their twins."""

from typing import Any

import pytest
import torch

from agentspec.engine.attention import Segment
from agentspec.engine.device_target import DeviceTarget
from agentspec.engine.kv import PageTable
from agentspec.engine.verify import Draw, Verified
from agentspec.kernels.triton import backend
from agentspec.types import SamplingParams
from bench.gpu_engine import TINY, make_target

SEEDED = SamplingParams(temperature=0.9, top_k=20, seed=3)


@pytest.fixture(autouse=True)
def interpreter() -> None:
    pytest.importorskip("triton")
    if not backend.interpreting():
        pytest.skip("TRITON_INTERPRET is not 1")


def steps(target: DeviceTarget) -> list[Verified]:
    """A chunk, then trees of two sequences, whose first is accepted as far as the target goes along."""
    first, second = PageTable(target.shape), PageTable(target.shape)
    made = [target.verify([chunk(first, 70), chunk(second, 5)], [69, 74], [None, Draw(SEEDED, 0)])]
    first.commit(range(70))
    second.commit(range(5))
    best = int(made[0].logits[0].argmax())
    tree = Segment(first, (69, (best + 1) % 96, best, 7), (0, 1, 1, 2), (-1, 0, 0, 2))
    root = Segment(second, (4,), (0,), None)
    made.append(target.verify([tree, root], range(5), [Draw(SamplingParams(), 0), Draw(SamplingParams(), 1)]))
    walked = made[1].walks[0]
    assert walked is not None
    first.commit(range(len(walked.path)))
    made.append(target.verify([Segment(first, (walked.tokens[-1],), (0,), None)], [0], [Draw(SEEDED, 9)]))
    return [Verified(verified.logits.clone(), verified.walks) for verified in made]


def chunk(table: PageTable, tokens: int) -> Segment:
    return Segment(table, tuple(range(tokens)), tuple(range(tokens)), None)


@pytest.mark.slow
def test_kernels_and_twins_give_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {**TINY, "num_hidden_layers": 2}
    kernels = steps(make_target(sizes, "cpu", torch.float32))
    monkeypatch.setattr(backend, "device_runs_triton", lambda device: False)
    twins = steps(make_target(sizes, "cpu", torch.float32))
    for mine, right in zip(kernels, twins, strict=True):
        assert mine.walks == right.walks
        torch.testing.assert_close(mine.logits, right.logits, rtol=0, atol=1e-4)
