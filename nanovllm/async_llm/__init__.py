"""The engine behind asyncio."""

from nanovllm.async_llm.async_llm import AsyncLLM, QueueFullError
from nanovllm.async_llm.request_stream import RequestStream

__all__ = ["AsyncLLM", "QueueFullError", "RequestStream"]
