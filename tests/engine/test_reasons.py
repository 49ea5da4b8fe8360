"""Why nothing was drafted is told by what the request asked for."""

from dataclasses import replace

import pytest

from agentspec.engine.reasons import reason_of
from agentspec.types import GenerationRequest, Grammar, GrammarKind, Scope, SpeculationParams, Trajectory

REQUEST = GenerationRequest((1,), Trajectory("run", Scope("default", "tiny")), 5)
NUMBER = Grammar(GrammarKind.REGEX, "[0-9]+", "guided_regex")
ONE_GRAMMAR = "drafters allows the grammar alone, "


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (REQUEST, "no match in the history"),
        (replace(REQUEST, max_tokens=0), "no token is asked for"),
        (
            replace(REQUEST, speculation=SpeculationParams(exact=True)),
            "exact: this model's logits are not the same bits in every pass",
        ),
        (replace(REQUEST, speculation=SpeculationParams(enabled=False)), "speculation is off for this request"),
        (replace(REQUEST, speculation=SpeculationParams(max_draft_tokens=0)), "max_draft_tokens is 0"),
        (replace(REQUEST, speculation=SpeculationParams(drafters=("scope", "grammar"))), "no match in the history"),
        (replace(REQUEST, speculation=SpeculationParams(drafters=())), "drafters is an empty list"),
        (
            replace(REQUEST, speculation=SpeculationParams(drafters=("grammar",))),
            ONE_GRAMMAR + "and the request has none",
        ),
        (
            replace(REQUEST, grammar=NUMBER, speculation=SpeculationParams(drafters=("grammar",))),
            ONE_GRAMMAR + "which always left a choice",
        ),
    ],
)
def test_the_reason_is_the_request_s_own(request_: GenerationRequest, reason: str) -> None:
    assert reason_of(request_, 32, exact=False) == reason


def test_a_server_that_drafts_nothing_says_so() -> None:
    assert reason_of(REQUEST, 0, exact=True) == "max_draft_tokens is 0"
