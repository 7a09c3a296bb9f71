"""Compiles grammars; a server tries each one first in a process with limits.

llguidance limits the work of masks and most of the work of compiling, but some schemas (`multipleOf` with a large
number) compile for minutes and take gigabytes, and a thread cannot be stopped in native code. A trial is a fork whose
CPU time and memory the operating system limits.

The process that runs the trials imports only this module and llguidance: numpy would start threads.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.utils.processes import start_python

T = TypeVar("T")

QUICK_SECONDS, MAX_SECONDS = 0.1, 2.0
"""CPU time limits of a grammar's first and last trial. Most grammars take milliseconds, 1 MB of choices 0.4 s."""
MAX_BYTES = 2**26
"""Memory limit of a trial."""
_MAX_STARTS = 2
"""Maximum starts of the trial process for one grammar."""
_MAX_REFUSED = 10_000
"""Maximum number of refused grammars that are remembered, by hash."""
_EXIT_SECONDS = 0.1
"""Longest delay between the end of a process's connections and its exit status."""
_NICENESS = 10
"""Scheduling priority of trials. A usual grammar needs milliseconds, and gets them even on a busy machine."""
_STACK_BYTES = 2**29
"""Address space of the compiling thread's stack; a usual grammar touches a few pages. See `grammars.MAX_RULES`."""
_LIMITS = {"step_max_items": 10_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""llguidance's limits; a mask takes about 0.01 s at most."""
_LEXER_FUEL, _CHOICE_FUEL = 100_000, 1_000_000
"""Work limits, about a second. Time grows with the square of a pattern's length, and linearly with a choice's."""
_TOO_LARGE = (
    f"structured_outputs takes more than {MAX_SECONDS:g} s of CPU time or {MAX_BYTES >> 20} MiB to compile; simplify it"
)
_STATM = Path("/proc/self/statm")
"""Sizes of a process on Linux, in pages; the sixth is the one that `RLIMIT_DATA` limits."""
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit of `ru_maxrss`."""
_MAX_MESSAGE = 500
_INSTEAD = {
    '"uniqueItems"': "instead of uniqueItems, bound the array by maxItems and drop repeated items afterwards",
    '"not"': "instead of not, say what is allowed, by enum, anyOf or a pattern",
    '"if"': "instead of if, then and else, give anyOf a branch for each case, told apart by a const",
    "oneOf constraints": "instead of oneOf, write anyOf, whose branches a const tells apart",
    '"propertyNames"': "instead of propertyNames, write patternProperties",
    '"contains"': "instead of contains, write prefixItems",
    '"dependentRequired"': "instead of dependentRequired, give anyOf a branch with the property and one without it",
    "look-around": "instead of look-around, write the alternatives out",
}
_MEANINGS = {"NoExtensionBias": "no text matches it; perhaps it refers to itself without an end"}
"""Explanations of llguidance's messages that are only names."""


class GrammarError(ValueError):
    """A grammar that is invalid, or too complex for llguidance."""


class SlowGrammarError(Exception):
    """A grammar that exceeds `QUICK_SECONDS` on trial; to be retried by `patiently`, where no other request waits."""


def with_advice(message: str) -> str:
    """Return llguidance's message, with advice on what to write instead."""
    advice = [text for refused, text in _INSTEAD.items() if refused in message]
    shown = message.replace("<non-verbose/>", "").strip()
    shown = _MEANINGS.get(shown, shown)
    # The message quotes the grammar, which may be long.
    return "; ".join([f"structured_outputs cannot be used: {shown[:_MAX_MESSAGE]}", *advice])


_trial_seconds: ContextVar[float] = ContextVar("trial_seconds", default=QUICK_SECONDS)


def patiently(function: Callable[[], T]) -> T:
    """Call a function, and allow the grammars that it compiles `MAX_SECONDS` on trial."""
    token = _trial_seconds.set(MAX_SECONDS)
    try:
        return function()
    finally:
        _trial_seconds.reset(token)


@dataclass(frozen=True)
class TokenizerParts:
    """The parts of a tokenizer that llguidance needs; picklable. Without `eos_token_ids`, llguidance finds them."""

    text: str
    num_tokens: int
    eos_token_ids: list[int] | None

    def tokenizer(self, library: Any) -> Any:
        """Make llguidance's tokenizer; takes about a second and 130 MB for 150,000 tokens."""
        # llguidance's own `from_tokenizer` would import transformers.
        return library.LLTokenizer(self.text, n_vocab=self.num_tokens, eos_token=self.eos_token_ids)


def compile_grammar(library: Any, tokenizer: Any, text: str, is_choice: bool) -> Any:
    """Compile a grammar, compute its first mask, which takes longest, and return a matcher at its start.

    `library` is the module llguidance, `text` in its form; `is_choice`: see `Grammar`. GrammarError if it cannot be
    used.
    """
    fuel = _CHOICE_FUEL if is_choice else _LEXER_FUEL
    limits = library.LLParserLimits(initial_lexer_fuel=fuel, **_LIMITS)
    try:
        # At level 1 warnings go to stderr.
        matcher = library.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except (TypeError, ValueError, RuntimeError) as error:
        raise GrammarError(with_advice(str(error))) from error
    if matcher.is_error():
        raise GrammarError(with_advice(matcher.get_error()))
    return matcher


_stack_lock = threading.Lock()


def call_with_large_stack(function: Callable[[], Any]) -> Any:
    """Call a function in a thread whose stack allows deep native recursion."""
    with ThreadPoolExecutor(1, "nanovllm-grammar") as executor:
        with _stack_lock:
            before = threading.stack_size(_STACK_BYTES)
            try:
                future = executor.submit(function)
            finally:
                threading.stack_size(before)
        return future.result()


class GrammarTrials:
    """Compiles grammars on trial, each in a fork of a dedicated process. Thread-safe.

    The process holds the tokenizer and has a single thread, so that it can be forked. It starts at the first grammar,
    and exits when this object is deleted.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._process: _TrialProcess | None = None
        self._refused: set[int] = set()

    def start(self) -> _TrialProcess:
        """Return the trial process, started if necessary."""
        with self._lock:
            if self._process is None or not self._process.is_running():
                self._process = _TrialProcess(self._parts)
            return self._process

    def num_bytes(self, text: str, is_choice: bool) -> int:
        """Return the bytes of memory that compiling a grammar takes.

        Raises:
            GrammarError: the grammar is invalid, or exceeds `MAX_SECONDS` or `MAX_BYTES`.
            SlowGrammarError: it exceeds `QUICK_SECONDS`, outside of `patiently`.
            RuntimeError: the trial process was killed, twice.
        """
        key, seconds = hash(text), _trial_seconds.get()
        if key in self._refused:
            raise GrammarError(_TOO_LARGE)
        for _ in range(_MAX_STARTS):
            process = self.start()
            with suppress(EOFError, ConnectionError):
                found = process.try_grammar(text, is_choice, seconds)
                if isinstance(found, str):
                    raise GrammarError(found)
                return found
            if process.is_running(_EXIT_SECONDS):
                break
        else:
            raise RuntimeError("structured_outputs cannot be compiled: the process that compiles them was killed")
        if seconds < MAX_SECONDS:
            raise SlowGrammarError
        if len(self._refused) == _MAX_REFUSED:
            self._refused.clear()
        self._refused.add(key)
        raise GrammarError(_TOO_LARGE)


class _TrialProcess:
    """The process that forks for each trial; it exits when this object is deleted."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._control, other = socket.socketpair()
        with other:
            arguments = (other.fileno(),)
            self.process = start_python(__name__, "run_trials", arguments, "nanovllm grammars", arguments)
        weakref.finalize(self, _end, self._control, self.process)
        with Connection(os.dup(self._control.fileno())) as connection, suppress(ConnectionError):
            connection.send(parts)

    def is_running(self, wait: float = 0.0) -> bool:
        """Return whether the process is running, and remains so for `wait` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(wait)
        return self.process.poll() is None

    def try_grammar(self, text: str, is_choice: bool, seconds: float) -> int | str:
        """Return the bytes that a grammar takes, or why it is invalid; EOFError or ConnectionError at a limit."""
        own, other = socket.socketpair()
        with Connection(own.detach()) as trial:
            with other:
                socket.send_fds(self._control, [b"t"], [other.fileno()])
            trial.send((text, is_choice, seconds))
            found: int | str = trial.recv()
            return found


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Kill the trial process."""
    control.close()
    process.kill()
    process.wait()


def run_trials(descriptor: int) -> None:
    """Run the trial process: fork for each trial, until the other end of the socket `descriptor` is closed."""
    import llguidance  # noqa: PLC0415

    # The system reaps the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Connection(os.dup(descriptor)) as connection:
        parts: TokenizerParts = connection.recv()
    tokenizer = parts.tokenizer(llguidance)
    # The server's own work comes first on a machine of few cores.
    os.nice(_NICENESS)
    control = socket.socket(fileno=descriptor)
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            # A fork would keep it open after the process is killed.
            control.close()
            try:
                _try_grammar(Connection(descriptors[0]), partial(compile_grammar, llguidance, tokenizer))
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _try_grammar(connection: Connection, compile_text: Callable[[str, bool], Any]) -> None:
    """Compile a grammar, and send the bytes of memory that it took, or why it is refused."""
    import resource  # noqa: PLC0415

    # Rust reports failed allocations there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    text, is_choice, seconds = connection.recv()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        call_with_large_stack(partial(_compile_within_limits, partial(compile_text, text, is_choice), seconds))
    except GrammarError as error:
        connection.send(str(error))
    else:
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        connection.send((after - before) * _MAXRSS_BYTES)


def _compile_within_limits(compile_text: Callable[[], Any], seconds: float) -> None:
    """Compile a grammar in this process, which the system kills at the limits."""
    # Not on Windows.
    import resource  # noqa: PLC0415

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The limit of CPU time; its signal ends the process.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # Other systems do not limit memory. The current size includes this thread's stack.
    if _STATM.exists():
        now = int(_STATM.read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (now + MAX_BYTES, now + MAX_BYTES))
    compile_text()
