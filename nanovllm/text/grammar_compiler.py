"""Compiles grammars, and finds out in a process that can be ended whether one can be afforded.

llguidance's own limits hold for masks and for most of compiling, but some schemas (`multipleOf` with a large number)
compile for minutes and take gigabytes, and no thread can be stopped in native code. So a server compiles each new
grammar on trial first, in a fork whose processor time and memory the system limits.

Knows nothing of torch and transformers: the process of the trials imports only this and llguidance.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nanovllm.text.grammar_text import with_advice
from nanovllm.utils.python_process import start_python

QUICK_SECONDS, MOST_SECONDS = 0.1, 2
"""Processor time of a grammar's first trial, and of its last. Most take milliseconds, a megabyte of choices 0.4 s."""
MOST_BYTES = 2**26
"""Memory to compile a grammar on trial."""
_MOST_STARTS = 2
"""Of the process of trials, for one grammar."""
_GRACE_SECONDS = 0.1
"""How long the end of the process may become visible after its connections have ended."""
_NICENESS = 10
"""Of trials: a usual grammar takes milliseconds, so that even a tenth of a processor is enough."""
_STACK_BYTES = 2**29
"""Of the thread that compiles: address space, of which a usual grammar touches a few pages. See `MAX_RULES`."""
_LIMITS = {"step_max_items": 10_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""llguidance's own, so that a mask takes about 0.01 s at most."""
_LEXER_FUEL, _CHOICE_FUEL = 100_000, 1_000_000
"""For compiling in about a second. A pattern's time grows with the square of its length, that of texts does not."""
_STATM = Path("/proc/self/statm")
"""Pages of a process on Linux; the sixth number is of what `RLIMIT_DATA` limits."""
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit of `ru_maxrss`."""


class GrammarError(ValueError):
    """A grammar that cannot be used, or that llguidance has given up on."""


class SlowGrammarError(Exception):
    """A grammar whose first trial was too short; the next one may take longer, where others do not wait for it."""


@dataclass(frozen=True)
class TokenizerParts:
    """What llguidance's tokenizer is made of.

    Attributes:
        text: of a `tokenizer.json`.
        num_tokens: token ids are below it.
        eos_token_ids: tokens that end an output; None leaves them to llguidance.
    """

    text: str
    num_tokens: int
    eos_token_ids: list[int] | None

    def tokenizer(self, library: Any) -> Any:
        """Return the tokenizer; takes about a second and 130 MB for 150,000 tokens."""
        # `from_tokenizer` of llguidance does the same, but imports transformers.
        return library.LLTokenizer(self.text, n_vocab=self.num_tokens, eos_token=self.eos_token_ids)


def compile_grammar(library: Any, tokenizer: Any, text: str, is_choice: bool) -> Any:
    """Return a matcher at the start of a grammar, that knows its first mask, which takes longest.

    Args:
        library: the module llguidance.
        tokenizer: in llguidance's form.
        text: the grammar, as llguidance takes it.
        is_choice: whether it lists texts; see `Grammar`.

    Raises:
        GrammarError: the grammar cannot be used.
    """
    fuel = _CHOICE_FUEL if is_choice else _LEXER_FUEL
    limits = library.LLParserLimits(initial_lexer_fuel=fuel, **_LIMITS)
    try:
        # Warnings, which level 1 has, go to stderr.
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
    """Compiles grammars on trial, each in a fork of a process of its own; several threads may do so at once.

    That process has the tokenizer and a single thread, so that it can be forked. It is started for the first grammar,
    and ends when this object does.

    Args:
        parts: of the tokenizer.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._process: _TrialProcess | None = None

    def start(self) -> _TrialProcess:
        """Return the process, which is started if it is not there."""
        with self._lock:
            if self._process is None or not self._process.is_alive:
                self._process = _TrialProcess(self._parts)
            return self._process

    def num_bytes(self, text: str, is_choice: bool, seconds: float) -> int | None:
        """Return the memory that a grammar takes to compile; None if it takes more processor time, or `MOST_BYTES`.

        Raises:
            GrammarError: it cannot be used.
        """
        for _ in range(_MOST_STARTS):
            process = self.start()
            with suppress(EOFError, OSError):
                found = process.try_grammar(text, is_choice, seconds)
                if isinstance(found, str):
                    raise GrammarError(found)
                return found
            if process.stays_alive():
                return None
            # The system has ended the process itself, to free memory.
        raise GrammarError("structured_outputs cannot be compiled: the process for it ends by itself")


class _TrialProcess:
    """The process that forks for each trial; it ends when this object does."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._control, other = socket.socketpair()
        with other:
            arguments = (other.fileno(),)
            self.process = start_python(__name__, "run_trials", arguments, "nanovllm grammars", arguments)
        weakref.finalize(self, _end, self._control, self.process)
        with Connection(os.dup(self._control.fileno())) as connection:
            connection.send(parts)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def stays_alive(self) -> bool:
        """Return whether the process goes on, after the end of a connection that it may have had."""
        # Connections are closed shortly before a process has ended.
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_SECONDS)
        return self.is_alive

    def try_grammar(self, text: str, is_choice: bool, seconds: float) -> int | str:
        """Return the memory that a grammar takes, in bytes, or why it is refused.

        Raises:
            EOFError, OSError: the trial or the process has ended.
        """
        own, other = socket.socketpair()
        with Connection(own.detach()) as trial:
            with other:
                socket.send_fds(self._control, [b"t"], [other.fileno()])
            trial.send((text, is_choice, seconds))
            found: int | str = trial.recv()
            return found


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the process of the trials."""
    control.close()
    process.kill()
    process.wait()


def run_trials(descriptor: int) -> None:
    """Run the process of the trials: fork for each, until the other end of a socket is closed.

    Args:
        descriptor: of the socket.
    """
    import llguidance  # noqa: PLC0415

    # Nobody waits for the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Connection(os.dup(descriptor)) as connection:
        parts: TokenizerParts = connection.recv()
    tokenizer = parts.tokenizer(llguidance)
    # Answers come first where processors are few.
    os.nice(_NICENESS)
    control = socket.socket(fileno=descriptor)
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            # It would keep the socket open after the process has ended.
            control.close()
            try:
                _try_grammar(Connection(descriptors[0]), partial(compile_grammar, llguidance, tokenizer))
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _try_grammar(connection: Connection, compile_text: Callable[[str, bool], Any]) -> None:
    """Compile a grammar, and send the memory that it took, in bytes, or why it is refused."""
    # Rust says there that memory is short.
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
    """Compile a grammar in this process, which the system ends at the limits."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Of the processor's time, to the microsecond; its signal ends the process.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # Elsewhere the system does not limit memory. The stack of this thread is in what it has now.
    if _STATM.exists():
        now = int(_STATM.read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (now + MOST_BYTES, now + MOST_BYTES))
    compile_text()
