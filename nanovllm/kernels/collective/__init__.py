"""Collective kernels over a symmetric buffer that several GPUs map."""
