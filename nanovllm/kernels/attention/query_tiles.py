"""How the queries of prompt chunks are cut into tiles, for every prefill kernel and for who lays the tiles out."""

QUERY_TILE = 128
"""Tokens of one tile of queries: one program's work for one head."""
UNALIGNED = ["block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr"]
"""Kernel arguments that point into larger tensors, whose alignment depends on the step's sizes."""
