"""What a report says where nothing was drafted, as far as the request alone decides it."""

from agentspec.types import GenerationRequest


def reason_of(request: GenerationRequest, most: int, *, exact: bool) -> str:
    """Why nothing was drafted for a request, unless something else is met on the way: `most` is the server's own limit
    of draft tokens, `exact` whether the target's logits are the same bits in every pass."""
    wanted = request.speculation
    if request.max_tokens == 0:
        return "no token is asked for"
    if wanted.exact and not exact:
        return "exact: this model's logits are not the same bits in every pass"
    if not wanted.enabled:
        return "speculation is off for this request"
    if min(wanted.max_draft_tokens, most) == 0:
        return "max_draft_tokens is 0"
    return reason_of_sources(wanted.drafters, constrained=request.grammar is not None)


def reason_of_sources(allowed: tuple[str, ...] | None, *, constrained: bool) -> str:
    """Why none of the allowed sources drafted."""
    if allowed is None or set(allowed) - {"grammar"}:
        return "no match in the history"
    if not allowed:
        return "drafters is an empty list"
    if not constrained:
        return "drafters allows the grammar alone, and the request has none"
    return "drafters allows the grammar alone, which always left a choice"
