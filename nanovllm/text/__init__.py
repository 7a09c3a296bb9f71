"""Converts a user's texts to the engine's token ids, and back."""
