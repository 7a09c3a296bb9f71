"""Constants shared by the prefill kernels and the code that builds `query_tiles`."""

QUERY_TILE = 128
"""Tokens per query tile."""
UNALIGNED = ["block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr"]
"""Kernel arguments that point into larger tensors, whose alignment depends on the step's sizes."""
