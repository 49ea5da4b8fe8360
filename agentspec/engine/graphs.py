"""CUDA graphs: work on tensors of fixed place, recorded once and replayed without the host's share of it."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Graphs:
    """Records on one device, all in one memory pool: they are replayed one after the other."""

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def recorded(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`run` as a graph, which gives the same tensor at each replay; `run` itself where there are no graphs.

        It runs once before it is recorded, so that kernels are compiled and their block sizes chosen. Where it cannot
        be recorded the log says so, and nothing is recorded any more.
        """
        if not self.enabled:
            return run
        graph = torch.cuda.CUDAGraph()
        try:
            warm_up(run)
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = run()
        except RuntimeError as error:
            log.warning("passes run without CUDA graphs from now on: %s", error)
            self.enabled = False
            return run

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def warm_up(run: Callable[[], Tensor]) -> None:
    """Run once on a stream of its own, as recording will."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
