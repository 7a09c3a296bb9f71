"""An OpenAI-compatible HTTP server."""
