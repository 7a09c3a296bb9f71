"""Tensor parallelism: shards, and collectives over tensors."""
