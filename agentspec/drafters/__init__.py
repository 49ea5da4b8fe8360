"""Proposers of token trees; all are untrusted."""
