"""The worker processes of tensor parallelism, which rank 0's runner drives."""
