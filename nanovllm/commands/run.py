"""`nanovllm run`: answers the lines of a file, in the order in which they finish.

The engine always has waiting requests beside the running ones, so the batch stays full until the input ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from nanovllm.batch_files.digests import AnsweredRequests, answer_header, request_digest, run_digest
from nanovllm.batch_files.inputs import InputFile, ReadAhead, UnreadableInputError
from nanovllm.batch_files.requests import BatchRequest, line_ids, load_line, parse_request
from nanovllm.batch_files.result_file import ResultFile
from nanovllm.batch_files.results import encode_line, error_line, result_line
from nanovllm.commands.start import check_flags
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput, StepError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.run_requests import Progress
from nanovllm.utils.flags import user_errors


@dataclass(frozen=True)
class PendingLine:
    """A line whose request is in the engine.

    Attributes:
        number: of the line, from 1.
        digest: of the line.
        ids: what its author called it.
        request: what it asks for.
    """

    number: int
    digest: int
    ids: dict[str, Any]
    request: BatchRequest


class BatchRun:
    """Answers lines.

    At any time at most three times `max_num_running` lines are held: those that run, as many in the engine's queue, and
    as many in that of `ReadAhead`.

    Args:
        llm: answers.
        lines: what is to be answered.
        defaults: sampling parameters of lines that do not say.
        run: digest of the run.
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
        run: str,
        write: Callable[[bytes], object],
        num_lines: int | None = None,
    ) -> None:
        self._llm = llm
        self._lines = lines
        self._defaults = defaults
        self._run = run
        self._write = write
        self._num_lines = num_lines
        self._most_pending = 2 * llm.config.max_num_running
        self._pending: dict[int, PendingLine] = {}
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
            self._pending[request_id] = PendingLine(number, request_digest(text), ids, request)

    def _step(self) -> None:
        try:
            finished = self._llm.step().finished
        except StepError as error:
            # Lines that failed with the device have no result, so that a later run answers them.
            self._llm.llm_engine.require_open()
            for request_id in error.request_ids:
                line = self._pending.pop(request_id)
                self._fail(line.number, line.ids, "server_error", str(error))
            return
        for request_id, output in finished:
            self._answer(self._pending.pop(request_id), output)

    def _answer(self, line: PendingLine, output: RequestOutput) -> None:
        result = result_line(line.number, line.ids, output, line.request, self._llm.config.model)
        try:
            encoded = encode_line(answer_header(line.number, self._run, line.digest) | result)
        except ValueError as error:
            # JSON has no NaN, which is the log-probability of a token where constraints allow none.
            self._fail(line.number, line.ids, "server_error", f"the answer cannot be written: {error}")
            return
        self._write(encoded)
        self.num_answered += 1

    def _fail(self, number: int, ids: dict[str, Any], code: str, message: str) -> None:
        self._write(encode_line(error_line(number, ids, code, message)))
        self.num_failed += 1


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code: 1 if a line failed."""
    with user_errors(parser):
        config, defaults = check_flags(options)
        source = InputFile(options.input)
        results = ResultFile(options.output)
    # The source stays open: closing it would wait for the thread that reads it.
    with results:
        with user_errors(parser):
            digest = run_digest(config, defaults)
            _load_results(results, source, options, digest)
            llm = LLM(**vars(config))
        with llm:
            with user_errors(parser):
                defaults = {**llm.recommended_values(), **defaults}
                llm.llm_engine.limits.check_params(SamplingParams(**defaults))
            if options.overwrite:
                results.clear()
            # For the bar; a large file takes seconds.
            num_lines = source.count_unanswered(results.answered) if sys.stderr.isatty() else None
            lines = ReadAhead(source.lines, results.answered, config.max_num_running)
            batch = BatchRun(llm, lines, defaults, digest, results.write, num_lines)
            try:
                _answer(batch, lines, source, results)
            except UnreadableInputError as error:
                parser.error(str(error))
    print(_summary(batch, results.answered, options.output), file=sys.stderr)
    return 1 if batch.num_failed else 0


def _load_results(results: ResultFile, source: InputFile, options: argparse.Namespace, digest: str) -> None:
    if not results.is_stream and os.path.sameopenfile(source.fileno(), results.fileno()):
        raise ValueError(f"{options.output} is the input: give another output")
    if not options.overwrite:
        results.load(digest)


def _answer(batch: BatchRun, lines: ReadAhead, source: InputFile, results: ResultFile) -> None:
    try:
        batch.run()
        if not source.is_stream:
            # A stream may have ended early, with the process that wrote it.
            results.answered.forget_after(lines.num_lines)
    finally:
        results.remove_replaced()


def _summary(batch: BatchRun, answered: AnsweredRequests, output: str) -> str:
    parts = [f"{batch.num_answered} lines answered, {batch.num_failed} failed"]
    if answered.num_unchanged:
        parts.append(f"{answered.num_unchanged} skipped, which {output} has")
    if answered.num_changed:
        parts.append(f"{answered.num_changed} had changed since {output} was written")
    if answered.num_gone:
        parts.append(f"{answered.num_gone} answers removed, whose lines are gone")
    return ", ".join(parts)
