"""Kernels, one file per op: the plain torch reference, the Triton kernel and the dispatcher have one signature."""
