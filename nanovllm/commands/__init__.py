"""What the commands `nanovllm run`, `generate` and `chat` do."""
