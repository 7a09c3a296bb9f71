"""Kernels of token mixers that keep a state of fixed size per sequence."""
