"""Kernels over memory that several GPUs share."""
