"""Samples tokens from logits and computes log-probabilities."""
