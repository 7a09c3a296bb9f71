"""Model weights: names, slices, checks, storage; a first load and an update share one code path."""
