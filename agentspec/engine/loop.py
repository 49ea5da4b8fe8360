"""The step loop: admit, plan drafts, one ragged target pass, walk, commit. Knows token ids, threads and sockets not."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np
from torch import Tensor

from agentspec.config import EngineConfig
from agentspec.engine.adjust import Adjuster
from agentspec.engine.attention import Segment
from agentspec.engine.commit import commit
from agentspec.engine.job import Job
from agentspec.engine.kv import KVPool
from agentspec.engine.logprobs import token_logprobs
from agentspec.engine.plan import disable, mean_context, plan
from agentspec.engine.sampling import choose
from agentspec.engine.target import Target
from agentspec.engine.verify import walk
from agentspec.errors import AgentSpecError, InternalError
from agentspec.policies.cost import Cost
from agentspec.policies.payoff import Acceptance
from agentspec.types import Delta, DraftTree, Outcome, TokenLogprob

log = logging.getLogger(__name__)


class StepLoop:
    """Runs jobs on a target, all of them in one batch. One thread owns it; only `Job.cancelled` is set by others."""

    def __init__(self, target: Target, config: EngineConfig, cost: Cost) -> None:
        self.target = target
        self.config = config
        self.cost = cost
        self.pool = KVPool(target.shape, config.kv_bytes)
        self.acceptance = Acceptance()
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.witness: Callable[[Job, Tensor], None] | None = None
        """Is shown the logits (tokens, vocabulary) that committed tokens were chosen from."""

        self.totals = {"steps_total": 0.0, "prefill_tokens_total": 0.0, "cached_tokens_total": 0.0}

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def step(self) -> None:
        """One target pass for the batch; what fails in it fails the jobs of the batch and nothing else."""
        self._drop_cancelled()
        self._admit()
        if not self.running:
            return
        try:
            self._pass()
        except Exception:
            log.exception("a pass failed")
            for job in list(self.running):
                self._fail(job)

    def _pass(self) -> None:
        decoding = [job for job in self.running if not job.prefilling]
        prefilling = next((job for job in self.running if job.prefilling), None)
        chunk = self._chunk(prefilling) if prefilling else None
        extra = len(chunk.tokens) if chunk else 0
        most = self.config.max_draft_tokens
        trees = plan(decoding, self.acceptance, self.cost, most, self.target.vocabulary, extra)
        segments = [self._segment(job, tree) for job, tree in zip(decoding, trees, strict=True)]
        rows = sum(len(tree) for tree in trees)
        context = mean_context(decoding)
        began = perf_counter()
        logits = self.target.forward([*segments, *([chunk] if chunk else [])], range(rows))
        if not chunk:
            self.cost.observe(rows, context, (perf_counter() - began) * 1e3, plain=rows == len(decoding))
        self.totals["steps_total"] += 1
        start = 0
        for job, tree in zip(decoding, trees, strict=True):
            try:
                self._commit(job, tree, logits[start : start + len(tree)])
            except AgentSpecError as error:
                self._fail(job, error)
            except Exception:
                log.exception("a request failed; the others of its pass go on")
                self._fail(job)
            start += len(tree)
        if prefilling and chunk:
            self._prefilled(prefilling, len(chunk.tokens))

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_running:
            job = self.waiting[0]
            if not self.pool.admits(job.most_tokens):
                return
            self.waiting.popleft()
            try:
                self._start(job)
            except Exception:
                log.exception("a request could not be started; the others go on")
                self._fail(job)

    def _start(self, job: Job) -> None:
        prompt = np.asarray(job.request.prompt, dtype=np.int32)
        job.holding = self.pool.acquire(job.request.trajectory, prompt, job.most_tokens)
        job.cached_tokens = job.slab_length
        job.clock.admitted = job.clock.prefilled = perf_counter()
        job.adjuster = Adjuster.of(job.request.sampling, job.request.prompt, job.completion.end_tokens)
        self.totals["cached_tokens_total"] += job.cached_tokens
        self.running.append(job)

    def _chunk(self, job: Job) -> Segment:
        assert job.holding is not None
        at = job.slab_length
        stop = min(len(job.tokens) - 1, at + self.config.prefill_chunk)
        return Segment(job.holding.slab, tuple(job.tokens[at:stop]), tuple(range(stop - at)), None)

    def _segment(self, job: Job, tree: DraftTree) -> Segment:
        assert job.holding is not None
        return Segment(job.holding.slab, tree.token, tree.depth, tree.parent if len(tree) > 1 else None)

    def _prefilled(self, job: Job, tokens: int) -> None:
        assert job.holding is not None
        job.holding.slab.commit(range(tokens))
        self.totals["prefill_tokens_total"] += tokens
        job.clock.prefilled = perf_counter()

    def _commit(self, job: Job, tree: DraftTree, logits: Tensor) -> None:
        assert job.holding is not None
        result = walk(tree, self._choice(job, logits))
        if job.constraint is not None:
            job.completion.complete_at = job.constraint.complete_at
        kept, text = commit(job.completion, result.tokens)
        job.tokens.extend(result.tokens[:kept])
        job.holding.slab.commit(result.path[:kept])
        accepted = tuple(node for node in result.path[1:] if tree.depth[node] <= kept)
        self.acceptance.observe(tree, result.path)
        job.tally.add(tree, accepted)
        job.clock.last = perf_counter()
        tokens = result.tokens[:kept]
        logprobs: tuple[TokenLogprob, ...] = ()
        if job.request.logprobs is not None:
            logprobs = token_logprobs(logits[list(result.path[:kept])], tokens, job.request.logprobs)
        if self.witness is not None:
            self.witness(job, logits[list(result.path[:kept])])
        self._observe(job, Outcome(tokens, tree, accepted))
        self._emit(job, Delta(text, kept, logprobs=logprobs))

    def _choice(self, job: Job, logits: Tensor) -> Callable[[int, int], int]:
        """The target's choice after a node of a job's tree, given the logits (nodes, vocabulary)."""
        sampling, adjuster, constraint = job.request.sampling, job.adjuster, job.constraint
        position = len(job.completion.tokens)
        if adjuster is None and constraint is None and sampling.temperature == 0:
            choices = logits.argmax(-1).tolist()
            return lambda node, depth: int(choices[node])

        def choice(node: int, depth: int) -> int:
            row = logits[node] if adjuster is None else adjuster(logits[node])
            row = row if constraint is None else constraint(row)
            token = choose(row, sampling, position + depth)
            if adjuster is not None:
                adjuster.push(token)
            if constraint is not None:
                constraint.push(token)
            return token

        return choice

    def _observe(self, job: Job, outcome: Outcome) -> None:
        if job.drafter is None:
            return
        try:
            job.drafter.observe(outcome)
        except Exception as error:
            disable(job, f"drafter failed: {type(error).__name__}")

    def _emit(self, job: Job, delta: Delta) -> None:
        if job.completion.finish:
            self._leave(job)
            delta = replace(delta, finish=job.completion.finish, report=job.report())
        job.emit(delta)

    def _fail(self, job: Job, error: AgentSpecError | None = None) -> None:
        if job in self.running:
            self._leave(job)
        job.fail(error or InternalError("the engine failed on this request"))

    def _leave(self, job: Job) -> None:
        assert job.holding is not None
        self.running.remove(job)
        self.pool.release(job.holding, job.tokens)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self.running if job.cancelled]:
            self._leave(job)
        if any(job.cancelled for job in self.waiting):
            self.waiting = deque(job for job in self.waiting if not job.cancelled)

    def fail_all(self, error: Exception) -> None:
        """End every job with `error`."""
        for job in [*self.running, *self.waiting]:
            job.fail(error)
        for job in list(self.running):
            self._leave(job)
        self.waiting.clear()

    def stats(self) -> dict[str, float]:
        """Counters and gauges by metric name."""
        return {
            **self.totals,
            "running_requests": len(self.running),
            "waiting_requests": len(self.waiting),
            "kv_used_bytes": self.pool.used * self.pool.shape.token_bytes,
            "kv_limit_bytes": self.pool.limit * self.pool.shape.token_bytes,
        }
