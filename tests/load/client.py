"""Streaming requests to an OpenAI-compatible server at given times, and what their answers say about it.

One process and one event loop send everything. A request's body is made before the clock starts, and of an answer only
the event with the usage is parsed as JSON; in the others, keys are looked for in the bytes. Latencies include the time
that this process takes: on one core of an AMD EPYC (2026-11-23, Python 3.11, aiohttp 3.14), 0.5 ms to send a request
and 0.03 ms to read an event that arrives alone, so about 30,000 of them a second. Events that arrive together are
cheaper.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp

# Within a JSON string each quote follows a backslash, so these find keys only, never a text that looks like one.
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content|arguments)"\s*:\s*"[^"]')
_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\{')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR = re.compile(rb'"error"\s*:\s*["{]')

# Each is one token, with the space before it, in the usual vocabularies.
_WORDS = """
the of and to in is was for on that with as it by at from his an were are which this be had or not but have one their
has its new first after who they two her she been other when all time there during into school more up no year years
over some most made later than only between may can such while about team game city state world war part national film
number season high early life house group name line work band day left long small book water
"""


@dataclass
class Outcome:
    """What became of a request; times are seconds of `time.perf_counter`.

    Attributes:
        due: when it was to be sent.
        sent: when it was sent.
        ended: when its answer had ended, or it failed.
        first: when the first text came; None without any.
        last: when the last token came; None without any.
        input_tokens: of the server's usage; 0 if it sends none.
        output_tokens: of the server's usage; without one, the events with text.
        error: what kind of failure; None if the answer is complete.
        detail: what the server or the system said about the failure.
    """

    due: float
    sent: float
    ended: float = 0.0
    first: float | None = None
    last: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    detail: str = ""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from sending to the first text."""
        return None if self.first is None else self.first - self.sent

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens after the first; None with fewer than two."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)


class AnswerStream:
    """Reads the server-sent events of one answer.

    Attributes:
        first, last: times of the first event with text, and of the last event with a choice. The latter may have no
            text: special tokens have none, and neither has the event with the finish reason.
        num_texts: events with text. An event with a role only is none of them.
        usage: the last event with a usage, in bytes; empty without any.
        error: an event that reports an error, in bytes; empty without any.
        done: whether the stream was ended by `[DONE]`.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.num_texts = 0
        self.usage = b""
        self.error = b""
        self.done = False
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Read what arrived at the time `now`; it may begin and end anywhere in a line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read_event(line[5:], now)

    def _read_event(self, event: bytes, now: float) -> None:
        if _TEXT.search(event):
            self.num_texts += 1
            if self.first is None:
                self.first = now
        if _CHOICE.search(event):
            self.last = now
        if _USAGE.search(event):
            self.usage = event
        if _ERROR.search(event):
            self.error = event
        if event.strip() == b"[DONE]":
            self.done = True

    def write_to(self, outcome: Outcome) -> None:
        """Set an outcome's times of tokens, its counts and, of an incomplete answer, its error."""
        usage = json.loads(self.usage)["usage"] if self.usage else {}
        outcome.first, outcome.last = self.first, self.last
        outcome.input_tokens = usage.get("prompt_tokens", 0)
        outcome.output_tokens = usage.get("completion_tokens", self.num_texts)
        if self.error:
            outcome.error, outcome.detail = "error in the stream", self.error.decode(errors="replace").strip()
        elif not self.done:
            outcome.error, outcome.detail = "broken stream", "it ended without [DONE]"


def open_session(api_key: str | None, timeout: float) -> aiohttp.ClientSession:
    """Return a session without a limit on connections; to be called in a running event loop.

    Args:
        api_key: sent as a bearer token; None sends none.
        timeout: seconds from sending a request to the end of its answer.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    # Servers close idle connections after a few seconds (uvicorn: 5). A request on one that is just being closed fails,
    # so they are closed here before.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1)
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout))


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the name of the first model that the server at `url` (`http://host:port/v1`) lists.

    Raises:
        ConnectionError: it cannot be reached, or lists none.
    """
    try:
        async with session.get(f"{url}/models") as response:
            body = await response.text(errors="replace")
            if response.status != 200:
                raise ConnectionError(f"{url}/models: HTTP {response.status}")
    except (asyncio.TimeoutError, aiohttp.ClientError) as error:
        raise ConnectionError(f"{url}/models: {error_kind(error)}") from error
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, TypeError, LookupError) as error:
        raise ConnectionError(f"{url}/models lists no model; name one with --model") from error


def error_kind(error: Exception, *, answered: bool = False) -> str:
    """Name the kind of an error that a request raised.

    Args:
        error: a timeout, a `ClientError` of aiohttp, or a `JSONDecodeError`.
        answered: whether the answer had begun.
    """
    if isinstance(error, asyncio.TimeoutError):
        return "timeout"
    if answered:
        return "broken stream"
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return "connection refused" if refused else "cannot connect"
    return "connection lost"


async def send(session: aiohttp.ClientSession, url: str, body: bytes, due: float) -> Outcome:
    """Post a streaming request and read its answer to the end; a failure is part of the outcome."""
    outcome, stream, answered = Outcome(due, sent=time.perf_counter()), AnswerStream(), False
    try:
        async with session.post(url, data=body) as response:
            answered = True
            if response.status == 200:
                async for data in response.content.iter_any():
                    stream.feed(data, time.perf_counter())
                stream.write_to(outcome)
            else:
                outcome.error, outcome.detail = f"HTTP {response.status}", await response.text(errors="replace")
    except (asyncio.TimeoutError, aiohttp.ClientError, json.JSONDecodeError) as error:
        outcome.error, outcome.detail = error_kind(error, answered=answered), str(error)
    outcome.ended = time.perf_counter()
    return outcome


async def send_all(
    session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], times: Sequence[float], concurrency: int
) -> list[Outcome]:
    """Send each request at its time, whether earlier ones have been answered or not.

    Args:
        session: of `open_session`.
        url: the endpoint's.
        bodies: of the requests.
        times: one for each body, in seconds from now, ascending.
        concurrency: most requests at once; a request over it is sent when another has ended.
    """
    slots, started = asyncio.Semaphore(concurrency), time.perf_counter()

    async def send_in_slot(body: bytes, due: float) -> Outcome:
        async with slots:
            return await send(session, url, body, due)

    tasks = []
    for body, offset in zip(bodies, times, strict=True):
        delay = started + offset - time.perf_counter()
        # All that are due are sent before answers are read; a sleep of 0 would send one per round of the event loop.
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(send_in_slot(body, started + offset)))
    return await asyncio.gather(*tasks)


def arrival_times(count: int, rate: float, rng: Random) -> list[float]:
    """Draw the times of a Poisson process of `rate` events per second, in seconds, ascending.

    Given that `count` events fall into `count / rate` seconds, they are independent and uniform there (Ross,
    Introduction to Probability Models, theorem 5.2). So the rate is met exactly; an infinite one gives zeros.
    """
    return sorted(rng.uniform(0, count / rate) for _ in range(count))


def random_text(num_words: int, rng: Random) -> str:
    """Draw English words, each about one token."""
    return " ".join(rng.choices(_WORDS.split(), k=num_words))


def random_ids(count: int, vocab_size: int, rng: Random) -> list[int]:
    """Draw token ids below `vocab_size`."""
    return [rng.randrange(vocab_size) for _ in range(count)]


def request_body(prompt: str | list[int], options: dict[str, Any], *, chat: bool) -> bytes:
    """Return the JSON of a streaming request: a chat's only message is the prompt.

    Args:
        prompt: a text, or for completions token ids.
        options: further fields.
        chat: for the chat endpoint, not that of completions.
    """
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    return json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}} | options).encode()
