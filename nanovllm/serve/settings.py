"""The server's settings."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.utils.checks import check_bool, check_int, check_number, strict_keywords


@strict_keywords
@dataclass(frozen=True)
class ServeSettings:
    """Settings of the HTTP server.

    Attributes:
        host: address to listen on; the default is this machine alone.
        port: TCP port; 0 takes a free one.
        api_key: clients must send it as `Authorization: Bearer KEY`; without one, the environment's NANOVLLM_API_KEY,
            and if there is none, everybody is answered.
        served_model_name: the model's name in the API; that of its folder if None.
        separate_reasoning: whether text between <think> and </think> is split off the answers of chats that do not say.
        tool_call_parser: how the model writes calls of tools: "hermes" (Qwen's), "llama3_json", or "auto".
        max_body_bytes: the largest request.
        max_output_tokens: the most tokens of one output, also of a request that does not say; None: the model's length.
        max_outputs: the most outputs of one request, prompts times answers.
        max_requests: the most requests at once; further ones get status 429.
        max_request_seconds: the longest time for one request.
        max_read_seconds: the longest time for the head of a request to arrive, and for its body.
        max_write_seconds: the longest time in which nothing of an answer can be sent, because its client does not read.
        grace_seconds: how long SIGTERM lets running requests go on.

    Raises:
        ValueError: a value is out of range, or a keyword is unknown.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    separate_reasoning: bool = False
    tool_call_parser: str = "auto"
    max_body_bytes: int = 4 * 2**20
    max_output_tokens: int | None = None
    max_outputs: int = 128
    max_requests: int = 2048
    max_request_seconds: float = 600.0
    max_read_seconds: float = 20.0
    max_write_seconds: float = 30.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_bool("separate_reasoning", self.separate_reasoning)
        for name in ("max_body_bytes", "max_outputs", "max_requests"):
            check_int(name, getattr(self, name), 1)
        if self.max_output_tokens is not None:
            check_int("max_output_tokens", self.max_output_tokens, 1)
        for name in ("max_request_seconds", "max_read_seconds", "max_write_seconds"):
            check_number(name, getattr(self, name), 0, above=True)
        check_number("grace_seconds", self.grace_seconds, 0)
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise ValueError("api_key must be ASCII characters")
