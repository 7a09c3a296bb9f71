"""Configs of models, read from their folders; no torch, which front ends do without."""
