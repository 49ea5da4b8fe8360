"""Recorded trajectories: schema, import, replay and its report."""
