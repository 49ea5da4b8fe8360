"""Kernels of the CPU path, compiled by numba: a whole pass of the target runs in them, on threads of their own.

Every row of a pass is computed with the same operations in the same order whatever the other rows are, so its
results have the same bits alone, in a tree, in a prompt's chunk and beside other sequences.
"""
