"""Sampling: from logits to tokens and log-probabilities."""
