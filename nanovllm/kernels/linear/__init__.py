"""Kernels for matrix products."""
