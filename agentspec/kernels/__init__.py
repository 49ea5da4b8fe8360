"""Compute kernels: compiled ones for CPUs."""
