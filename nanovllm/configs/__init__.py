"""Model configs, read from their folders; without torch, which front ends do not need."""
