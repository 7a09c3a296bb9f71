"""Weights of a model: names, slices, checks, storage; a first load and an update are the same code."""
