"""One file per op: the plain torch reference, its Triton kernel, and the dispatcher, of one signature."""
