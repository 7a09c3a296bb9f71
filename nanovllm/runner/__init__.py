"""Runs one device: the model, its KV cache, and the steps that the engine schedules."""
