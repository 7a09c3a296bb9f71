"""Command `nanovllm run`: answers the lines of a file, in the order in which they finish.

The engine always has waiting requests, so the batch stays full until the input ends.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

from nanovllm.cli.batch_input import WHOLE, InputFile, Shard, UnansweredLines, UnreadableInputError
from nanovllm.cli.batch_lines import (
    BatchRequest,
    RequestParser,
    encode_line,
    error_line,
    line_ids,
    load_line,
    result_line,
)
from nanovllm.cli.batch_output import AnsweredRequests, ResultFile, answer_header, run_digest
from nanovllm.cli.chat import check_flags
from nanovllm.client.jobs import (
    CHUNK_SIZE,
    Done,
    JobRun,
    PreparedPrompt,
    Progress,
    ReadAhead,
    RefusedPrompt,
    prepared_prompt,
)
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.answers import AnswerFormat
from nanovllm.utils.flags import user_errors


class Line(NamedTuple):
    """An input line.

    Attributes:
        number: number of the line, from 1.
        digest: digest of the line.
        ids: the author's ids of the line.
        request: the parsed request; None if it is invalid.
    """

    number: int
    digest: int
    ids: dict[str, Any]
    request: BatchRequest | None


class BatchRun:
    """Answers lines.

    The number of lines in the engine is limited like a job's prompts; two prepared chunks of lines wait, and one is
    being read.

    Args:
        llm: the model.
        lines: lines to answer.
        parser: parses lines as requests.
        run: digest of the run.
        write: writes output lines.
        num_lines: number of lines; None if unknown.
        chunk_size: lines prepared in one call.

    Attributes:
        num_answered, num_failed: answered and failed lines so far.
    """

    def __init__(
        self,
        llm: LLM,
        lines: UnansweredLines,
        parser: RequestParser,
        run: str,
        write: Callable[[list[bytes]], object],
        *,
        num_lines: int | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        self._llm = llm
        self._lines = lines
        self._parser = parser
        self._checker = llm.input_processor.params_checker()
        self._run = run
        self._write = write
        self._num_lines = num_lines
        self._chunk_size = chunk_size
        self.num_answered = self.num_failed = 0

    def run(self) -> None:
        """Answer all lines.

        Raises:
            OSError: a file cannot be read or written.
            RuntimeError: the engine is closed because the device is lost.
        """
        client = self._llm.engine_client
        # None disables the progress bar without a terminal.
        progress = Progress(client.engine, self._num_lines, "line", disable=None)
        lines = ReadAhead(self._lines, self._prepare, self._chunk_size)
        JobRun(client, lines, self._answer, progress, self._llm.most_pending, returns_errors=True).run()

    def _prepare(self, lines: list[tuple[int, int, bytes]]) -> list[PreparedPrompt]:
        """Return the requests of lines."""
        prepared, prompts, chats = list[PreparedPrompt](), list[Line](), list[Line]()
        for number, digest, text in lines:
            ids: dict[str, Any] = {}
            try:
                record = load_line(text)
                ids = line_ids(record)
                request = self._parser.parse(record)
                request.encode(self._llm.input_processor)
            except ValueError as error:
                prepared.append(RefusedPrompt(number, Line(number, digest, ids, None), error))
            else:
                line = Line(number, digest, ids, request)
                (prompts if request.messages is None else chats).append(line)
        return [*prepared, *self._process(prompts), *self._process(chats, self._rendered)]

    def _process(
        self, lines: list[Line], template: Callable[[BatchRequest], str] | None = None
    ) -> Iterator[PreparedPrompt]:
        asked = [line.request for line in lines if line.request is not None]
        requests = self._llm.input_processor.process_each(
            [request.prompt for request in asked] if template is None else asked,
            [request.params for request in asked],
            [0] * len(asked),
            template=template,
            seeds=self._seeds(lines),
            checker=self._checker,
        )
        for line, request in zip(lines, requests, strict=True):
            yield prepared_prompt(request, self._llm.output_processor, line.number, line)

    def _rendered(self, request: BatchRequest) -> str:
        return request.rendered(self._llm.tokenizer)

    def _seeds(self, lines: list[Line]) -> list[int] | None:
        seed = self._llm.config.seed
        # Derive the seed from the line, since request numbers change when a run is resumed.
        return None if seed is None else [Random(f"{seed} {line.number}").getrandbits(64) for line in lines]

    def _answer(self, done: Done) -> None:
        """Write finished results."""
        if any(output.error is not None for _, output in done):
            # Lines that failed with the device get no result, so that a later run answers them.
            self._llm.engine_client.engine.require_open()
        self._write([self._result(item, output) for item, output in done])

    def _result(self, item: PreparedPrompt, output: RequestOutput) -> bytes:
        line: Line = item.source
        if output.error is not None or line.request is None:
            code = "invalid_request" if isinstance(item, RefusedPrompt) else "server_error"
            return self._failure(line, code, output.error or "")
        result = result_line(line.number, line.ids, output, line.request, self._llm.config.model)
        try:
            encoded = encode_line(answer_header(line.number, self._run, line.digest) | result)
        except ValueError as error:
            # JSON has no NaN, the log-probability of a token if constraints allow no token.
            return self._failure(line, "server_error", f"the answer cannot be written: {error}")
        self.num_answered += 1
        return encoded

    def _failure(self, line: Line, code: str, message: str) -> bytes:
        self.num_failed += 1
        return encode_line(error_line(line.number, line.ids, code, message))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code: 1 if a line failed."""
    with user_errors(parser):
        config, defaults = check_flags(options)
        # Report unknown names before loading the model.
        AnswerFormat(None, options.tool_call_parser, options.reasoning_parser or "auto")
        shard = _shard(options)
        source = InputFile(options.input)
        if options.contiguous:
            shard = shard.contiguous(sum(1 for _ in source.lines_again()))
        results = ResultFile(options.output)
    # The source stays open: closing it would wait for the reading thread.
    with results:
        with user_errors(parser):
            parsers = {"tool_call_parser": options.tool_call_parser, "reasoning_parser": options.reasoning_parser}
            named = {name: value for name, value in parsers.items() if value not in (None, "auto")}
            digest = run_digest(config, defaults | named)
            _load_results(results, source, options, digest, shard)
            llm = LLM(**vars(config))
        with llm:
            with user_errors(parser):
                recommended = llm.recommended_values()
                llm.limits.check_params(SamplingParams(**{**recommended, **defaults}))
                form = AnswerFormat(llm.tokenizer, options.tool_call_parser, options.reasoning_parser or "auto")
                requests = RequestParser(recommended, defaults, form, options.reasoning_parser is not None)
            if options.overwrite:
                results.clear()
            # For the progress bar; a large file takes seconds.
            num_lines = source.count_unanswered(results.answered, shard) if sys.stderr.isatty() else None
            lines = UnansweredLines(source.lines, results.answered, shard)
            # Loaded objects stay alive: collecting garbage among them takes as long as thousands of lines.
            gc.collect()
            gc.freeze()
            batch = BatchRun(llm, lines, requests, digest, results.write, num_lines=num_lines)
            try:
                _answer(batch, lines, source, results)
            except UnreadableInputError as error:
                parser.error(str(error))
            finally:
                # Native libraries report objects that are frozen at exit as leaks.
                gc.unfreeze()
    print(_summary(batch, results.answered, options.output), file=sys.stderr)
    return 1 if batch.num_failed else 0


def _shard(options: argparse.Namespace) -> Shard:
    if options.contiguous and options.shard is None:
        raise ValueError("--contiguous says how an input is cut into shards: give --shard too")
    return WHOLE if options.shard is None else Shard.parse(options.shard)


def _load_results(
    results: ResultFile, source: InputFile, options: argparse.Namespace, digest: str, shard: Shard
) -> None:
    if results.is_file(source.fileno()):
        raise ValueError(f"{options.output} is the input: give another output")
    if options.overwrite:
        return
    results.load(digest)
    # Lines of other shards are answered by other runs.
    if len(results.answered) and options.shard is not None:
        source.require_unchanged(results.answered, shard)


def _answer(batch: BatchRun, lines: UnansweredLines, source: InputFile, results: ResultFile) -> None:
    try:
        batch.run()
        if not source.is_stream:
            # A stream ends early if its writer is killed.
            results.answered.forget_after(lines.num_lines)
    finally:
        results.finish()


def _summary(batch: BatchRun, answered: AnsweredRequests, output: str) -> str:
    parts = [f"{batch.num_answered} lines answered, {batch.num_failed} failed"]
    if answered.num_unchanged:
        parts.append(f"{answered.num_unchanged} skipped, which {output} has")
    if answered.num_changed:
        parts.append(f"{answered.num_changed} had changed since {output} was written")
    if answered.num_gone:
        parts.append(f"{answered.num_gone} answers removed, whose lines are gone")
    return ", ".join(parts)
