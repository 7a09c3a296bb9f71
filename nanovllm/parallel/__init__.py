"""Tensor parallelism: shards, collectives over tensors, and messages between ranks."""
