"""The step loop: admit, plan drafts, one ragged target pass, walk, commit. Knows token ids, threads and sockets not."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter

from torch import Tensor

from agentspec.cache.codec import digest_of
from agentspec.config import EngineConfig
from agentspec.engine.adjust import Adjuster
from agentspec.engine.attention import Segment
from agentspec.engine.commit import commit
from agentspec.engine.job import Job
from agentspec.engine.logprobs import rows_at_once, token_logprobs
from agentspec.engine.plan import disable, mean_context, plan
from agentspec.engine.prefix import KVPool
from agentspec.engine.sampling import choose
from agentspec.engine.schedule import Scheduler, rank, shares
from agentspec.engine.target import AnyTarget
from agentspec.engine.verify import Draw, Verified, Walk, walk
from agentspec.errors import AgentSpecError, InternalError
from agentspec.policies.cost import Cost
from agentspec.policies.payoff import Acceptance, pruned
from agentspec.types import Delta, DraftTree, FinishReason, Outcome, Scope, TokenLogprob, Trajectory

log = logging.getLogger(__name__)


class StepLoop:
    """Runs jobs on a target, all of them in one batch. One thread owns it; only `Job.cancelled` is set by others."""

    def __init__(self, target: AnyTarget, config: EngineConfig, cost: Cost) -> None:
        self.target = target
        self.config = config
        self.cost = cost
        self.pool = KVPool(target.shape, config.kv_bytes, config.prefix_sharing)
        self.scheduler = Scheduler(self.pool, config.max_running)
        self.acceptance = Acceptance()
        self.witness: Callable[[Job, Tensor], None] | None = None
        """Is shown the logits (tokens, vocabulary) that committed tokens were chosen from."""

        self.totals = {"steps_total": 0.0, "prefill_tokens_total": 0.0, "cached_tokens_total": 0.0}

    @property
    def idle(self) -> bool:
        return not self.scheduler.waiting and not self.scheduler.running

    def add(self, job: Job) -> None:
        """A job waits for its place."""
        self.scheduler.waiting.append(job)

    def step(self) -> None:
        """One target pass for the batch; what fails in it fails the jobs of the batch and nothing else."""
        self.scheduler.drop_cancelled()
        self.scheduler.admit(self._start, self._fail)
        if not self.scheduler.running:
            return
        try:
            self._pass()
        except Exception:
            log.exception("a pass failed")
            for job in list(self.scheduler.running):
                self._fail(job)

    def _pass(self) -> None:
        self.scheduler.make_room()
        chunks = self._chunks()
        decoding = [job for job in self.scheduler.running if not job.prefilling]
        trees = self._trees(decoding, sum(chunks.values()))
        segments = [tree_segment(job, tree) for job, tree in zip(decoding, trees, strict=True)]
        segments += [chunk_segment(job, size) for job, size in chunks.items()]
        rows = sum(len(tree) for tree in trees)
        keep = [*range(rows), *kept_rows(rows, chunks)]
        context = mean_context(decoding)
        began = perf_counter()
        draws = [self._draw(job) for job in decoding]
        draws += [self._draw(job) if size == job.uncomputed else None for job, size in chunks.items()]
        kept = [len(tree) for tree in trees] + [len(kept_of(job, size)) for job, size in chunks.items()]
        results = results_of(self.target.verify(segments, keep, draws), kept)
        if not chunks:
            self.cost.observe(rows, context, (perf_counter() - began) * 1e3, plain=rows == len(decoding))
        self.totals["steps_total"] += 1
        for job, tree, result in zip(decoding, trees, results, strict=False):
            self._guarded(job, partial(self._commit, job, tree, *result))
        for (job, size), result in zip(chunks.items(), results[len(decoding) :], strict=True):
            self._guarded(job, partial(self._prefilled, job, size, *result))

    def _draw(self, job: Job) -> Draw | None:
        """How the target may choose a job's next tokens by itself; None where the host needs their logits."""
        needed = job.request.logprobs is not None or job.scoring or self.witness is not None
        if needed or job.adjuster is not None or job.constraint is not None:
            return None
        return Draw(job.request.sampling, len(job.completion.tokens))

    def _guarded(self, job: Job, act: Callable[[], None]) -> None:
        """What a pass means for one job; a fault of it is that job's own."""
        try:
            act()
        except AgentSpecError as error:
            self._fail(job, error)
        except Exception:
            log.exception("a request failed; the others of its pass go on")
            self._fail(job)

    def _chunks(self) -> dict[Job, int]:
        """Prefilling jobs and how many of their tokens the next pass computes; one of those whose rows all give logits
        at a time."""
        jobs = sorted((job for job in self.scheduler.running if job.prefilling), key=rank)
        scoring = next((job for job in jobs if job.scoring), None)
        wanted = [job.uncomputed if not job.scoring else 0 for job in jobs]
        if scoring is not None:
            wanted[jobs.index(scoring)] = min(scoring.uncomputed, rows_at_once(self.target.vocabulary))
        given = shares(jobs, wanted, self.config.prefill_chunk)
        return {job: self.scheduler.rows(job, size) for job, size in zip(jobs, given, strict=True) if size}

    def _trees(self, jobs: Sequence[Job], extra_rows: int) -> list[DraftTree]:
        """Drafts of the next pass, as far as there is memory for their rows."""
        most = self.config.max_draft_tokens
        trees = plan(jobs, self.acceptance, self.cost, most, self.target.vocabulary, extra_rows)
        rows = [self.scheduler.rows(job, len(tree)) for job, tree in zip(jobs, trees, strict=True)]
        return [
            tree if size == len(tree) else pruned(tree, range(size)) for tree, size in zip(trees, rows, strict=True)
        ]

    def _start(self, job: Job) -> None:
        """A job got a place, for the first time or again."""
        now = perf_counter()
        if not job.clock.admitted:
            job.cached_tokens = job.computed
            job.clock.admitted = now
            self.totals["cached_tokens_total"] += job.cached_tokens
            job.adjuster = Adjuster.of(job.request.sampling, job.request.prompt, job.completion.end_tokens)
        if job.tally.steps == 0:
            job.clock.prefilled = now
        self._end_unless_wanted(job)

    def _prefilled(self, job: Job, size: int, logits: Tensor, walked: Walk | None) -> None:
        """Commits a chunk of a prompt, and the token that the last one gives; `logits` are those of its kept rows."""
        assert job.holding is not None
        last = size == job.uncomputed
        job.holding.table.commit(range(size - last))
        self.totals["prefill_tokens_total"] += size - last
        self.pool.publish(job.holding, job.tokens, part=last)
        if job.scoring:
            self._score(job, logits[: size - last])
        if job.prefilling:
            return
        wanted = job.completion.max_tokens > 0
        if job.tally.steps == 0:
            job.clock.prefilled = perf_counter()
            job.tally.prefilled = int(last and wanted)
        self._end_unless_wanted(job)
        if last and wanted:
            self._commit(job, DraftTree.root(job.tokens[-1]), logits[-1:], walked)

    def _score(self, job: Job, logits: Tensor) -> None:
        """Tells the log-probabilities of the prompt tokens after the positions that were committed just now; `logits`
        are those of these positions."""
        following = job.request.prompt[job.scored + 1 : job.computed + 1]
        job.scored += len(following)
        if following:
            told = token_logprobs(logits[len(logits) - len(following) :], following, job.request.prompt_logprobs or 0)
            job.emit(Delta("", 0, prompt_logprobs=told))

    def _end_unless_wanted(self, job: Job) -> None:
        """A job that only reads its prompt ends with it."""
        if job.completion.max_tokens == 0 and not job.prefilling:
            job.clock.last = job.clock.prefilled
            job.completion.finish = FinishReason.LENGTH
            self._emit(job, Delta("", 0))

    def _commit(self, job: Job, tree: DraftTree, logits: Tensor, walked: Walk | None) -> None:
        """Commits what the walk gives: the target's own, which has moved the rows of its path, or the host's."""
        assert job.holding is not None
        result = walked or walk(tree, self._choice(job, logits))
        if job.constraint is not None:
            job.completion.complete_at = job.constraint.complete_at
        kept, text = commit(job.completion, result.tokens)
        job.tokens.extend(result.tokens[:kept])
        job.holding.table.commit(range(kept) if walked else result.path[:kept])
        self.pool.publish(job.holding, job.tokens)
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
            self.scheduler.leave(job)
            delta = replace(delta, finish=job.completion.finish, report=job.report())
        job.emit(delta)

    def _fail(self, job: Job, error: AgentSpecError | None = None) -> None:
        if job.holding is not None:
            self.scheduler.leave(job)
        job.fail(error or InternalError("the engine failed on this request"))

    def fail_all(self, error: Exception) -> None:
        """End every job with `error`."""
        for job in [*self.scheduler.running, *self.scheduler.waiting]:
            job.fail(error)
        for job in list(self.scheduler.running):
            self.scheduler.leave(job)
        self.scheduler.waiting.clear()

    def forget(self, scope: Scope, digests: Collection[str]) -> bool:
        """Trajectories of a scope, known by their digests, were deleted: their pages go; whether there were any."""
        jobs = (*self.scheduler.running, *self.scheduler.waiting)
        owners = {owner for owner in self.pool.tips if owner[0] == scope} | {job.owner for job in jobs}
        named = [owner for owner in owners if owner[0] == scope and digest_of(Trajectory(owner[1], scope)) in digests]
        return any([self.scheduler.forget(owner) for owner in named])

    def stats(self) -> dict[str, float]:
        """Counters and gauges by metric name."""
        page = self.pool.shape.page_bytes
        return {
            **self.totals,
            "preemptions_total": self.scheduler.preemptions,
            "kv_evicted_bytes_total": self.pool.evicted * page,
            "running_requests": len(self.scheduler.running),
            "waiting_requests": len(self.scheduler.waiting),
            "kv_used_bytes": self.pool.pages * page,
            "kv_running_bytes": self.pool.held * page,
            "kv_limit_bytes": self.pool.limit * page,
        }


def tree_segment(job: Job, tree: DraftTree) -> Segment:
    """A decoding job's rows: its last token and the drafts below it."""
    assert job.holding is not None
    return Segment(job.holding.table, tree.token, tree.depth, tree.parent if len(tree) > 1 else None)


def chunk_segment(job: Job, size: int) -> Segment:
    """A prefilling job's rows: its next `size` tokens."""
    assert job.holding is not None
    return Segment(job.holding.table, tuple(job.tokens[job.computed : job.computed + size]), tuple(range(size)), None)


def kept_of(job: Job, size: int) -> range:
    """Rows of a chunk of a job's next `size` tokens whose logits are wanted: all where they are told, else the last one
    of the prompt."""
    return range(size) if job.scoring else range(size - (size == job.uncomputed), size)


def results_of(verified: Verified, kept: Sequence[int]) -> list[tuple[Tensor, Walk | None]]:
    """Each segment's logits, given how many rows of it were kept, and its walk; the logits are on the host where no
    walk was made."""
    starts = [0, *accumulate(kept)]
    parts = [verified.logits[start:stop] for start, stop in pairwise(starts)]
    return [(part if walked else part.cpu(), walked) for part, walked in zip(parts, verified.walks, strict=True)]


def kept_rows(start: int, chunks: Mapping[Job, int]) -> Iterator[int]:
    """The wanted rows of all chunks, which begin at row `start` of the pass."""
    for job, size in chunks.items():
        yield from (start + row for row in kept_of(job, size))
        start += size
