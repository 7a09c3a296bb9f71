"""The server's settings."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

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
        allowed_hosts: host names that requests may be for, such as llm.example.com or *.example.com; "*": any. If None,
            this machine's own if the server listens to this machine alone and has no key, since a web page could
            otherwise have its host name point here (DNS rebinding); else any.
        allowed_origins: web pages, such as https://chat.example.com, whose scripts may use the server (CORS); "*": any.
        served_model_name: the model's name in the API; that of its folder if None.
        separate_reasoning: whether text between <think> and </think> is split off the answers of chats that do not say.
        tool_call_parser: how the model writes calls of tools: "hermes" (Qwen's), "llama3_json", or "auto".
        max_body_bytes: the largest request.
        max_output_tokens: the most tokens of one output, also of a request that does not say; None: the model's length.
        max_outputs: the most outputs of one request, prompts times answers.
        max_logprobs_per_request: the most log-probabilities that one request may ask for, of all tokens of its outputs
            and of its prompts together.
        max_requests: the most requests at once; further ones get status 429.
        max_connections: the most connections at once, and as many as the limit of open files allows; further ones get
            status 503, unless others have long waited for a request, which are closed for them.
        max_request_seconds: the longest time for one request; a client that then still reads its answer gets
            `max_write_seconds` for the rest.
        max_read_seconds: the longest time for the head of a request to arrive, and for its body.
        max_write_seconds: the longest time in which nothing of an answer can be sent, because its client does not read.
        grace_seconds: within what time SIGTERM ends the server; requests that still run at four fifths of it end with
            what they have.
        allow_priority: whether requests may have a `priority`, by which one client can get ahead of all others.
        access_log: whether each request is logged with its status.
        log_requests: whether each request is logged with its sampling parameters, and its end with counts and times.

    Raises:
        ValueError: a value is out of range, or a keyword is unknown.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    allowed_hosts: list[str] | None = None
    allowed_origins: list[str] | None = None
    served_model_name: str | None = None
    separate_reasoning: bool = False
    tool_call_parser: str = "auto"
    max_body_bytes: int = 4 * 2**20
    max_output_tokens: int | None = None
    max_outputs: int = 128
    max_logprobs_per_request: int = 2**19
    max_requests: int = 2048
    max_connections: int = 4096
    max_request_seconds: float = 600.0
    max_read_seconds: float = 20.0
    max_write_seconds: float = 30.0
    grace_seconds: float = 20.0
    allow_priority: bool = False
    access_log: bool = False
    log_requests: bool = False

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        for name in ("separate_reasoning", "allow_priority", "access_log", "log_requests"):
            check_bool(name, getattr(self, name))
        for name in ("max_body_bytes", "max_outputs", "max_logprobs_per_request", "max_requests", "max_connections"):
            check_int(name, getattr(self, name), 1)
        if self.max_output_tokens is not None:
            check_int("max_output_tokens", self.max_output_tokens, 1)
        for name in ("max_request_seconds", "max_read_seconds", "max_write_seconds"):
            check_number(name, getattr(self, name), 0, above=True)
        check_number("grace_seconds", self.grace_seconds, 0)
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise ValueError("api_key must be ASCII characters")
        for pattern in self.allowed_hosts or []:
            # The form that Starlette's TrustedHostMiddleware takes.
            if "*" in pattern[1:] or (pattern.startswith("*") and pattern != "*" and not pattern.startswith("*.")):
                raise ValueError(f"allowed_hosts has {pattern!r}, which is neither a name nor *.NAME nor *")

    @property
    def trusted_hosts(self) -> list[str]:
        """The host names that requests may be for."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return [*_LOOPBACK_HOSTS, self.host] if self.api_key is None and _is_loopback(self.host) else ["*"]


_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
