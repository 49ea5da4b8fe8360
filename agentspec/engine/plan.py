"""Before a pass: ask every job's drafter, distrust what it says, and keep the nodes that pay."""

import logging
from collections.abc import Sequence
from time import perf_counter

from agentspec.engine.forced import GRAMMAR, constrained
from agentspec.engine.job import Job
from agentspec.policies.cost import Cost
from agentspec.policies.payoff import Acceptance, best_cut, pruned
from agentspec.types import DraftTree

log = logging.getLogger(__name__)


def fault_of(tree: DraftTree, root: int, vocabulary: int) -> str | None:
    """What is wrong with a proposed tree; None if it can be verified."""
    size = len(tree)
    columns = (tree.parent, tree.depth, tree.logp, tree.cum, tree.origin)
    if size == 0 or any(len(column) != size for column in columns):
        return "its columns differ in length"
    if tree.token[0] != root or tree.parent[0] != -1 or tree.depth[0] != 0:
        return "its root is not the last committed token"
    for node in range(1, size):
        parent = tree.parent[node]
        if not 0 <= parent < node or tree.depth[node] != tree.depth[parent] + 1:
            return f"node {node} does not follow its parent"
        if not 0 <= tree.token[node] < vocabulary:
            return f"node {node} has token {tree.token[node]}"
        if not tree.logp[node] <= 0:
            return f"node {node} has log-probability {tree.logp[node]}"
    if len(set(zip(tree.parent, tree.token, strict=True))) != size:
        return "two siblings carry the same token"
    return None


def budget_of(job: Job, most: int) -> int:
    """Draft nodes that make sense for a job: none beyond its last token but one."""
    if job.completion.room <= 1:
        return 0
    return min(most, job.request.speculation.max_draft_tokens)


def disable(job: Job, reason: str) -> None:
    """Stop drafting for this request."""
    log.warning("drafting disabled for a request: %s", reason, exc_info=True)
    job.drafter = None
    job.reason = reason


def proposal(job: Job, most: int, vocabulary: int) -> DraftTree:
    """The drafter's tree, cut to what the request's grammar allows and grown by what it forces; or the bare root."""
    budget = budget_of(job, most)
    tree = drafted(job, budget, vocabulary)
    wanted = job.request.speculation
    if job.constraint is None or not wanted.enabled or budget == 0:
        return tree
    forcing = wanted.drafters is None or GRAMMAR in wanted.drafters
    return constrained(tree, job.constraint, budget, job.completion.room - 1, forcing=forcing)


def drafted(job: Job, budget: int, vocabulary: int) -> DraftTree:
    """The drafter's tree, or the bare root: a fault of the drafter costs the drafts of this request, nothing else."""
    bare = DraftTree.root(job.tokens[-1])
    if job.drafter is None or budget == 0:
        return bare
    try:
        tree = job.drafter.propose(budget)
    except Exception as error:
        disable(job, f"drafter failed: {type(error).__name__}")
        return bare
    fault = fault_of(tree, job.tokens[-1], vocabulary)
    if fault:
        disable(job, f"drafter proposed a malformed tree: {fault}")
        return bare
    depth_limit = job.completion.room - 1
    return pruned(tree, [node for node in range(len(tree)) if tree.depth[node] <= depth_limit][: budget + 1])


def mean_context(jobs: Sequence[Job]) -> float:
    """Committed tokens of a sequence, on average."""
    return sum(job.computed for job in jobs) / max(len(jobs), 1)


def plan(
    jobs: Sequence[Job],
    acceptance: Acceptance,
    cost: Cost,
    most: int,
    vocabulary: int,
    extra_rows: int,
) -> list[DraftTree]:
    """One tree per decoding job for the next pass, which holds `extra_rows` rows beside them."""
    start = perf_counter()
    drafting = [job for job in jobs if job.drafter is not None]
    trees = [proposal(job, 0 if cost.plain_is_due else most, vocabulary) for job in jobs]
    context = mean_context(jobs)
    reaches = [acceptance.calibrated(tree) for tree in trees]
    cuts = best_cut(reaches, lambda rows: cost(rows, context), extra_rows)
    for job, tree, cut in zip(jobs, trees, cuts, strict=True):
        if job.drafter is not None and len(tree) > len(cut) == 1:
            job.reason = "no draft was worth its cost"
    trees = [pruned(tree, cut) for tree, cut in zip(trees, cuts, strict=True)]
    spent = perf_counter() - start
    for job in drafting:
        job.clock.drafting += spent / len(drafting)
    return trees
