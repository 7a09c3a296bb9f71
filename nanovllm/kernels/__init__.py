"""Kernels, one file per op: the plain torch reference, and the op itself, which launches Triton kernels on GPUs."""
