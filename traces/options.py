"""How a replay is run; apart, so that the command line can show the defaults at once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How turns are replayed."""

    model: str | None = None
    """Model to ask for; None asks for the first one that the server lists."""

    turns: int | None = None
    """Most turns of one trajectory; None replays all."""

    max_tokens: int = 96
    """Most tokens to generate per turn."""

    temperature: float = 0.0
    top_p: float = 1.0
    sampling_seed: int = 0
    baseline: bool = False
    """Send each turn with speculation off and on."""

    speculation: bool = True
    """Whether the only arm of a run without baseline speculates."""

    clients: int = 1
    """Trajectories replayed at the same time; the turns of one follow each other."""

    max_prompt_tokens: int | None = None
    """Skip turns whose prompt is longer, at an estimated 4 characters a token; None skips none."""

    api_key: str | None = None
