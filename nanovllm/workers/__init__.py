"""The processes of tensor parallelism: rank 0's runner drives the others."""
