"""What the commands `nanovllm run` and `nanovllm chat` do."""
