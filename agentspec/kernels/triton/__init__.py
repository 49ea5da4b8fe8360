"""Kernels of the GPU worker in Triton, each beside a twin in torch that says what it computes.

A module such as `tree_attention` holds the checks, the choice of block sizes and the twin; `tree_attention_triton`
holds the kernel and is imported only where Triton runs.
"""
