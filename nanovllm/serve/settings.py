"""Settings of the HTTP server, each a flag of `nanovllm serve`, and counts for the limits of the whole server."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass, fields
from enum import IntEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from nanovllm.text.answers import AnswerFormat
from nanovllm.utils.checks import check_bool, check_int, check_number, strict_keywords

_MOST_FRONT_ENDS = 4
_CORES_PER_FRONT_END = 4
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@strict_keywords
@dataclass(frozen=True)
class ServeSettings:
    """Settings of the HTTP server.

    Attributes:
        host: address to listen on; the default accepts only this machine.
        port: TCP port; 0 chooses a free one.
        front_ends: number of HTTP processes, with the engines in processes of their own; 1: a single process does both.
            None: a quarter of the cores, at most 4; 1 if the model is on the CPU, and with `uds`.
        uds: path of a Unix domain socket to listen on, instead of host and port.
        root_path: path prefix under which a proxy exposes the server.
        ssl_keyfile: private key for TLS, a PEM file.
        ssl_certfile: certificate for TLS, a PEM file.
        ssl_ca_certs: certificate authorities of client certificates, a PEM file; None: clients need no certificate.
        api_key: keys; clients must send one as `Authorization: Bearer KEY` or `x-api-key: KEY`; defaults to
            the environment's NANOVLLM_API_KEY. Without any key, all requests are accepted.
        allowed_hosts: accepted host names, such as llm.example.com or *.example.com; "*": any. None: only this
            machine's if only this machine can connect, without a key (against DNS rebinding); else any.
        allowed_origins: web pages, such as https://chat.example.com, whose scripts may use the server (CORS); "*": any.
        served_model_name: the model's names in the API; answers have the first. None: its folder's name.
        chat_template: a Jinja template or a file with one, instead of the tokenizer's.
        default_chat_template_kwargs: default variables of the chat template.
        separate_reasoning: whether reasoning is separated from chat answers by default.
        reasoning_parser: format of the model's reasoning, which is then separated, by vLLM's names
            (`REASONING_FORMATS` in `text/answer_formats.py`); None: detected in the chat template.
        tool_call_parser: format of the model's tool calls, by vLLM's names (`TOOL_CALL_FORMATS` in
            `text/answer_formats.py`); "auto": detected in the chat template.
        max_body_bytes: maximum size of a request's body.
        control: enable endpoints for training loops, which pause the engine, put it to sleep and change its weights;
            needs an API key, unless the server listens on this machine only.
        weights_root: folder below which weights may be loaded over HTTP; None: loading is forbidden.
        max_output_tokens: maximum and default tokens of one output; None: the model's length.
        max_outputs: maximum outputs of one request, prompts times answers.
        max_logprobs_per_request: maximum log-probabilities of one request, over all tokens of its outputs and prompts.
        max_requests: maximum requests at once; others get status 429.
        max_connections: maximum connections at once, fewer if the limit of open files is low; others get status 503,
            unless a connection has been idle for a second, which is then closed instead.
        max_request_seconds: maximum time of one request; a client that is still reading its answer then gets
            `max_write_seconds` for the rest.
        max_read_seconds: maximum time for receiving a request's head, and for its body.
        max_write_seconds: maximum time without progress in sending an answer, because its client does not read.
        grace_seconds: time within which the server exits after SIGTERM; requests still running after four fifths of it
            end with partial answers.
        allow_priority: whether requests may have a `priority`, by which one client can get ahead of all others.
        access_log: log each request with its route and status.
        log_requests: log each request with its sampling parameters and the names of unknown fields, and its end with
            counts and times.
        exit_when_engine_fails: exit with code 1 when the engine is lost, so that a supervisor can restart the server;
            otherwise `/health` reports it.

    Raises:
        ValueError: a value is out of range, or a keyword is unknown.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    front_ends: int | None = None
    uds: str | None = None
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    api_key: list[str] | None = None
    allowed_hosts: list[str] | None = None
    allowed_origins: list[str] | None = None
    served_model_name: list[str] | None = None
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool = False
    reasoning_parser: str | None = None
    tool_call_parser: str = "auto"
    max_body_bytes: int = 4 * 2**20
    control: bool = False
    weights_root: str | None = None
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
    exit_when_engine_fails: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value = item.name, getattr(self, item.name)
            if item.type == "bool":
                check_bool(name, value)
            elif item.type == "float":
                check_number(name, value, 0, above=name != "grace_seconds")
            elif name == "port":
                check_int(name, value, 0, 65535)
            elif item.type == "int" or (item.type == "int | None" and value is not None):
                check_int(name, value, 1)
        self._check_texts()
        self.template_text()
        AnswerFormat(None, self.tool_call_parser, self.reasoning_parser or "auto")

    def _check_texts(self) -> None:
        for name in ("api_key", "served_model_name"):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, list) and given and all(given)):
                raise ValueError(f"{name} must be a list of texts, not {given!r:.80}")
        if not all(key.isascii() for key in self.api_key or []):
            raise ValueError("api_key must be ASCII characters")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None) or (self.ssl_ca_certs and not self.ssl_certfile):
            raise ValueError("TLS needs both ssl_keyfile and ssl_certfile")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path={self.root_path!r} must begin with a slash, and not end with one")
        for pattern in self.allowed_hosts or []:
            # The form that Starlette's TrustedHostMiddleware expects.
            if "*" in pattern[1:] or (pattern.startswith("*") and pattern != "*" and not pattern.startswith("*.")):
                raise ValueError(f"allowed_hosts has {pattern!r}, which is neither a name nor *.NAME nor *")

    def template_text(self) -> str | None:
        """Return the chat template, read from a file if necessary; None: the tokenizer's. ValueError if it is none."""
        given = self.chat_template
        if given is None or "{" in given:
            return given
        if not Path(given).is_file():
            raise ValueError(f"chat_template={given!r:.200} is neither a file nor a Jinja template")
        return Path(given).read_text(encoding="utf-8")

    def check_access(self) -> None:
        """Raise a ValueError if others could control the engine, or `weights_root` is no folder or lacks `control`."""
        if self.weights_root is not None and not self.control:
            raise ValueError(f"weights_root={self.weights_root!r} needs control=True")
        if self.weights_root is not None and not Path(self.weights_root).is_dir():
            raise ValueError(f"weights_root={self.weights_root!r} must be a folder")
        if self.control and not self.api_key and self.uds is None and not _is_loopback(self.host):
            raise ValueError(f"control=True needs an api_key: the server listens to others, on host={self.host!r}")

    def num_front_ends(self, is_on_gpu: bool, num_cores: int) -> int:
        """Return the number of HTTP processes; ValueError if several are not possible with these settings."""
        if self.front_ends is not None:
            if self.front_ends > 1 and self.uds is not None:
                raise ValueError(f"front_ends={self.front_ends}: a server with uds has one")
            return self.front_ends
        if not is_on_gpu or self.uds is not None or sys.platform == "win32":
            return 1
        return max(1, min(_MOST_FRONT_ENDS, num_cores // _CORES_PER_FRONT_END))

    @property
    def trusted_hosts(self) -> list[str]:
        """The accepted host names."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return [*_LOOPBACK_HOSTS, self.host] if self.api_key is None and _is_loopback(self.host) else ["*"]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Counted(IntEnum):
    """Counted quantities: requests with a body, and connections."""

    REQUESTS = 0
    CONNECTIONS = 1


@dataclass(frozen=True)
class SharedServer:
    """A front end's part, at `index`, in a server of several.

    `listener` and `counts`: descriptors of its socket and of the memory of all `ServerCounts`; `number`: how many
    front ends started before it, including replaced ones.
    """

    model_folder: str
    listener: int
    counts: int
    index: int
    number: int
    metrics_folder: str


class ServerCounts:
    """Counts of all front ends, for limits of the whole server, in shared memory.

    A front end, at `index`, writes only its `own` numbers, so that no locks are needed; front ends that check a limit
    at the same time may slightly exceed it. `memory`: shared by all, of `size` bytes; None if there is only one.
    """

    def __init__(self, memory: mmap.mmap | bytearray | None = None, index: int = 0) -> None:
        self._all = memoryview(bytearray(self.size(1)) if memory is None else memory).cast("q")
        self.own = self._all[index * len(Counted) : (index + 1) * len(Counted)]

    @staticmethod
    def size(num_front_ends: int) -> int:
        """Return the size of a server's counts in bytes."""
        return 8 * len(Counted) * num_front_ends

    def total(self, counted: Counted) -> int:
        """Return a number's total over all front ends."""
        return sum(self._all[counted :: len(Counted)])
