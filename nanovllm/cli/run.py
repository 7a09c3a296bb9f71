"""Command `nanovllm run`: answers the lines of a file, in the order in which they finish.

The engine always has waiting requests, so the batch stays full until the input ends.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

from nanovllm.cli.batch_files import (
    WHOLE,
    AnsweredRequests,
    InputFile,
    LineShard,
    ResultFile,
    UnreadableInputError,
    run_digest,
)
from nanovllm.cli.batch_lines import IDS, BatchRequest, RequestParser, encode_line, load_line, result_fields
from nanovllm.cli.chat import check_flags
from nanovllm.client.jobs import CHUNK_SIZE, Done, JobRun, PreparedPrompt, Progress, ReadAhead
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.answers import AnswerFormat
from nanovllm.utils.flags import user_errors


class Line(NamedTuple):
    """An input line: its number, from 1, digest, author's ids, and its request; None if that is invalid."""

    number: int
    digest: int
    ids: dict[str, Any]
    request: BatchRequest | None


@dataclass(eq=False)
class BatchRun:
    """Answers lines, and writes results that name the run by its `digest`.

    The number of lines in the engine is limited like a job's prompts; two prepared chunks of `chunk_size` lines wait,
    and one is being read. `num_lines` is for the progress bar; None if unknown.
    """

    llm: LLM
    lines: Iterable[tuple[int, int, bytes]]
    parser: RequestParser
    digest: str
    write: Callable[[list[bytes]], object]
    num_lines: int | None = None
    chunk_size: int = CHUNK_SIZE
    num_answered: int = 0
    num_failed: int = 0

    def run(self) -> None:
        """Answer all lines; OSError if a file cannot be read or written, RuntimeError if the device is lost."""
        client = self.llm.engine_client
        # None disables the progress bar without a terminal.
        progress = Progress(client.engine, self.num_lines, "line", disable=None)
        lines = ReadAhead(self.lines, self._prepare, self.chunk_size)

        def deliver(done: Done) -> None:
            if any(output.error is not None for _, output in done):
                # Lines that failed with the device get no result, so that a later run answers them.
                client.engine.require_open()
            self.write([self._result(item, output) for item, output in done])

        JobRun(client, lines, deliver, progress, self.llm.most_pending, returns_errors=True).run()

    def _prepare(self, lines: list[tuple[int, int, bytes]]) -> list[PreparedPrompt]:
        """Return the requests of lines."""
        prepared, prompts, chats = list[PreparedPrompt](), list[Line](), list[Line]()
        for number, digest, text in lines:
            ids: dict[str, Any] = {}
            try:
                record = load_line(text)
                ids = {name: record[name] for name in IDS if name in record}
                request = self.parser.parse(record)
                request.encode(self.llm.input_processor)
            except ValueError as error:
                prepared.append(PreparedPrompt(number, Line(number, digest, ids, None), error))
            else:
                line = Line(number, digest, ids, request)
                (prompts if request.messages is None else chats).append(line)
        rendered = self._process(chats, lambda request: request.rendered(self.llm.tokenizer))
        return [*prepared, *self._process(prompts), *rendered]

    def _process(
        self, lines: list[Line], template: Callable[[BatchRequest], str] | None = None
    ) -> Iterator[PreparedPrompt]:
        asked, seed = [line.request for line in lines if line.request is not None], self.llm.config.seed
        requests = self.llm.input_processor.process_each(
            [request.prompt for request in asked] if template is None else asked,
            [request.params for request in asked],
            [0] * len(asked),
            template=template,
            # Derived from the line, since request numbers change when a run is resumed.
            seeds=None if seed is None else [Random(f"{seed} {line.number}").getrandbits(64) for line in lines],
        )
        for line, request in zip(lines, requests, strict=True):
            yield PreparedPrompt(line.number, line, request)

    def _result(self, item: PreparedPrompt, output: RequestOutput) -> bytes:
        line: Line = item.source
        if output.error is not None or line.request is None:
            code = "invalid_request" if isinstance(item.request, ValueError) else "server_error"
            return self._failure(line, code, output.error or "")
        fields = result_fields(line.number, line.ids, output, line.request, self.llm.config.model)
        header = {"line": line.number, "run": self.digest, "request": f"{line.digest:016x}"}
        try:
            encoded = encode_line(header | fields)
        except ValueError as error:
            # JSON has no NaN, the log-probability of a token if constraints allow no token.
            return self._failure(line, "server_error", f"the answer cannot be written: {error}")
        self.num_answered += 1
        return encoded

    def _failure(self, line: Line, code: str, message: str) -> bytes:
        self.num_failed += 1
        error = {"code": code, "message": message}
        return encode_line({"line": line.number, **line.ids, "response": None, "error": error})


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code: 1 if a line failed."""
    with user_errors(parser):
        config, defaults = check_flags(options)
        reasoning = options.reasoning_parser or "auto"
        # Report unknown names before loading the model.
        AnswerFormat(None, options.tool_call_parser, reasoning)
        shard, source = _shard_and_input(options)
        results = ResultFile(options.output)
    # The source stays open: closing it would wait for the reading thread.
    with results:
        with user_errors(parser):
            named = {name: getattr(options, name) for name in ("tool_call_parser", "reasoning_parser")}
            named = {name: value for name, value in named.items() if value not in (None, "auto")}
            digest = run_digest(config, defaults | named)
            _load_results(results, source, options, digest, shard)
            llm = LLM(**vars(config))
        with llm:
            with user_errors(parser):
                recommended = llm.recommended_values()
                llm.limits.check_params(SamplingParams(**{**recommended, **defaults}))
                form = AnswerFormat(llm.tokenizer, options.tool_call_parser, reasoning)
                requests = RequestParser(recommended, defaults, form, options.reasoning_parser is not None)
            if options.overwrite:
                results.clear()
            # For the progress bar; a large file takes seconds.
            num_lines = source.count_unanswered(results.answered, shard) if sys.stderr.isatty() else None
            lines = results.answered.unanswered(source.lines, shard)
            batch = BatchRun(llm, lines, requests, digest, results.write, num_lines=num_lines)
            try:
                _answer(batch, source, results)
            except UnreadableInputError as error:
                parser.error(str(error))
    print(_summary(batch, results.answered, options.output), file=sys.stderr)
    return 1 if batch.num_failed else 0


def _shard_and_input(options: argparse.Namespace) -> tuple[LineShard, InputFile]:
    if options.contiguous and options.shard is None:
        raise ValueError("--contiguous says how an input is cut into shards: give --shard too")
    shard = WHOLE if options.shard is None else LineShard.parse(options.shard)
    source = InputFile(options.input)
    # Contiguous lines keep equal prefixes together.
    return replace(shard, num_lines=sum(1 for _ in source.lines_again())) if options.contiguous else shard, source


def _load_results(
    results: ResultFile, source: InputFile, options: argparse.Namespace, digest: str, shard: LineShard
) -> None:
    if not results.is_stream and source.is_same_file(options.output):
        raise ValueError(f"{options.output} is the input: give another output")
    if not options.overwrite:
        results.load(digest)
        results.answered.require_shard(shard)


def _answer(batch: BatchRun, source: InputFile, results: ResultFile) -> None:
    # Loaded objects stay alive: collecting garbage among them takes as long as thousands of lines.
    gc.collect()
    gc.freeze()
    try:
        batch.run()
        if not source.is_stream:
            # A stream ends early if its writer is killed.
            results.answered.forget_rest()
    finally:
        # Native libraries report objects that are frozen at exit as leaks.
        gc.unfreeze()
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
