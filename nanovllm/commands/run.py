"""`nanovllm run`: answers the lines of a file, in the order in which they finish.

The engine always has waiting requests beside the running ones, so the batch stays full until the input ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from nanovllm.batch_files.files import ReadAhead, count_lines, open_input, open_output
from nanovllm.batch_files.requests import BatchRequest, line_ids, load_line, parse_request
from nanovllm.batch_files.results import encode_line, error_line, result_line
from nanovllm.commands.start import check_flags
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput, StepError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.run_requests import Progress
from nanovllm.utils.flags import user_errors


class BatchRun:
    """Answers lines.

    At any time at most three times `max_num_running` lines are held: those that run, as many in the engine's queue, and
    as many in that of `ReadAhead`.

    Args:
        llm: answers.
        lines: what is to be answered.
        defaults: sampling parameters of lines that do not say.
        write: takes a line of the output.
        num_lines: how many there are; None if it is not known.

    Attributes:
        num_answered, num_failed: lines so far.
    """

    def __init__(
        self,
        llm: LLM,
        lines: ReadAhead,
        defaults: Mapping[str, Any],
        write: Callable[[bytes], object],
        num_lines: int | None = None,
    ) -> None:
        self._llm = llm
        self._lines = lines
        self._defaults = defaults
        self._write = write
        self._num_lines = num_lines
        self._most_pending = 2 * llm.config.max_num_running
        # Of each request in the engine its line's number, what its author called it, and what it asks for.
        self._pending: dict[int, tuple[int, dict[str, Any], BatchRequest]] = {}
        self.num_answered = self.num_failed = 0

    def run(self) -> None:
        """Answer all lines.

        Raises:
            OSError: a file cannot be read or written.
            RuntimeError: the engine is closed, since the device is lost.
        """
        num_done = 0
        # No progress bar where nobody looks.
        with Progress(self._llm.llm_engine, self._num_lines, "line", disable=None) as progress:
            while self._fill():
                self._step()
                before, num_done = num_done, self.num_answered + self.num_failed
                if num_done > before:
                    progress.update(num_done - before)

    def _fill(self) -> bool:
        """Queue lines until there are enough; returns whether a request is left. With none, waits for a line."""
        while len(self._pending) < self._most_pending:
            line = self._lines.take(wait=not self._pending)
            if line is None:
                break
            self._add(*line)
        return bool(self._pending)

    def _add(self, number: int, text: bytes) -> None:
        ids: dict[str, Any] = {}
        try:
            record = load_line(text)
            ids = line_ids(record)
            request = parse_request(record, self._defaults)
            if request.params.seed is None and self._llm.config.seed is not None:
                # The engine would take the request's number, which is another one when a run goes on.
                request.params.seed = Random(f"{self._llm.config.seed} {number}").getrandbits(64)
            request_id = self._llm.add_request(request.rendered(self._llm.tokenizer), request.params)
        except ValueError as error:
            self._fail(number, ids, "invalid_request", str(error))
        else:
            self._pending[request_id] = number, ids, request

    def _step(self) -> None:
        try:
            finished = self._llm.step().finished
        except StepError as error:
            # Lines that failed with the device have no result, so that a later run answers them.
            self._llm.llm_engine.require_open()
            for request_id in error.request_ids:
                number, ids, _ = self._pending.pop(request_id)
                self._fail(number, ids, "server_error", str(error))
            return
        for request_id, output in finished:
            self._answer(output, *self._pending.pop(request_id))

    def _answer(self, output: RequestOutput, number: int, ids: dict[str, Any], request: BatchRequest) -> None:
        try:
            line = encode_line(result_line(number, ids, output, request, self._llm.config.model))
        except ValueError as error:
            # JSON has no NaN, which is the log-probability of a token where constraints allow none.
            self._fail(number, ids, "server_error", f"the answer cannot be written: {error}")
            return
        self._write(line)
        self.num_answered += 1

    def _fail(self, number: int, ids: dict[str, Any], code: str, message: str) -> None:
        self._write(encode_line(error_line(number, ids, code, message)))
        self.num_failed += 1


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code."""
    with user_errors(parser):
        config, defaults = check_flags(options)
        source = open_input(options.input)
        output, done = open_output(options.output)
        llm = LLM(**vars(config))
    # The source stays open: closing it would wait for the thread that reads it.
    with output, llm:
        with user_errors(parser):
            defaults = {**llm.recommended_values(), **defaults}
            llm.llm_engine.limits.check_params(SamplingParams(**defaults))

        def write(line: bytes) -> None:
            output.write(line)
            # A line that is not in the file when the process is killed is answered again.
            output.flush()

        # For the bar; a large file takes seconds.
        num_lines = count_lines(source, done) if sys.stderr.isatty() else None
        batch = BatchRun(llm, ReadAhead(source, done, config.max_num_running), defaults, write, num_lines)
        batch.run()
    skipped = f", {done.count} skipped, which {options.output} has" if done.count else ""
    print(f"{batch.num_answered} lines answered, {batch.num_failed} failed{skipped}", file=sys.stderr)
    return 0
