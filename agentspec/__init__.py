"""Agent-workflow acceleration: drafts from an agent's own history, verified losslessly by its model."""

__version__ = "0.1.0"
