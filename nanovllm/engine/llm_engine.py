"""The engine: requests in, tokens out, one step at a time.

A step plans the next batch while the device runs the one before (`pipeline_depth` 1, on CUDA) or runs what it planned
(depth 0, on the CPU). What depends on values, and so on results, is done a step later; see `Scheduler`.
"""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol, TypedDict

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.messages import ScheduledBatch, StepOutput
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_token_ids
from nanovllm.utils.interrupt import deferred_sigint

_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15


class RequestOutput(TypedDict):
    """A finished request: its text without special tokens, its tokens, why it ended, and what the cache saved."""

    text: str
    token_ids: list[int]
    finish_reason: str
    num_cached_tokens: int


class StepResult(NamedTuple):
    """What a step finished, by request id, and how many tokens it took in and got out."""

    finished: list[tuple[int, RequestOutput]]
    num_prompt_tokens: int
    num_output_tokens: int


class StepError(RuntimeError):
    """A step failed, and with it the requests `request_ids`; the cause is the exception's `__cause__`."""

    def __init__(self, message: str, request_ids: list[int]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class Handle(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for the step and return its tokens."""


class Runner(Protocol):
    """What the engine needs of a `ModelRunner`."""

    pipeline_depth: int
    num_kvcache_blocks: int

    def launch(self, batch: ScheduledBatch) -> Handle:
        """Queue one step."""

    def synchronize(self) -> None:
        """Wait for all that was launched; raises if the device is lost."""

    def exit(self) -> None:
        """Let go of the device."""


class LLMEngine:
    """Requests, their scheduling, and the runner that computes them.

    Args:
        config: the engine's settings.
        runner: runs the batches.
        vocab_size: token ids of prompts must be below it.
        max_model_len: most tokens of one request.
        eos_token_ids: tokens that end a request.
        tokenizer: a transformers tokenizer; without one, prompts are token ids and outputs have no text.
    """

    def __init__(
        self,
        config: Config,
        runner: Runner,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: Any = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._runner: Runner | None = runner
        self.block_manager = BlockManager(
            runner.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_running=config.max_num_running,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
        )
        self._seed = secrets.randbits(64) if config.seed is None else config.seed
        self._next_request_id = 0
        self._in_flight: deque[tuple[ScheduledBatch, Handle]] = deque()
        # Finished requests that no caller of `step` has seen yet.
        self._unclaimed: list[tuple[int, RequestOutput]] = []

    def add_request(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> int:
        """Queue a request and return its id.

        Raises:
            ValueError: the prompt or the request's size is out of bounds.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        (token_ids,) = self.check_requests([prompt], [params])
        return self._queue(token_ids, params)

    def check_requests(self, prompts: list[Any], params: list[SamplingParams]) -> list[array[int]]:
        """Return the token ids of prompts (strings or lists of token ids), if all the requests can be served.

        Raises:
            ValueError: one cannot; says what is out of bounds.
        """
        token_ids = iter(self._tokenize([prompt for prompt in prompts if isinstance(prompt, str)]))
        return [
            self._check_request(next(token_ids) if isinstance(prompt, str) else prompt, param)
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def _check_request(self, prompt: Any, params: SamplingParams) -> array[int]:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {params!r}")
        try:
            token_ids = check_token_ids(prompt, self.vocab_size)
        except TypeError as error:
            kind = type(prompt).__name__
            raise ValueError(f"a prompt is a string or a list of token ids, not {kind}: {prompt!r:.80}") from error
        if len(token_ids) > self.max_model_len:
            raise ValueError(f"the prompt has {len(token_ids)} tokens, over max_model_len={self.max_model_len}")
        # The last token is returned, never computed, so its keys need no place.
        num_stored = max(len(token_ids), min(len(token_ids) + params.max_tokens, self.max_model_len) - 1)
        capacity = self.block_manager.num_blocks * self.block_manager.block_size
        if num_stored > capacity:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and max_tokens={params.max_tokens} need {num_stored} places, "
                f"over the cache's {capacity} (num_kvcache_blocks * kvcache_block_size)"
            )
        return token_ids

    def step(self) -> StepResult:
        """Plan and launch one step, and take in the results of the one before.

        Raises:
            StepError: the step failed; the requests in it are gone, the others stay queued.
            RuntimeError: the engine is closed.
        """
        before = self.scheduler.stats.num_output_tokens
        # An interrupted step would leave requests half-moved; and what a whole one finished is not lost to a Ctrl-C.
        with deferred_sigint():
            num_prompt_tokens = self._step()
        finished, self._unclaimed = self._unclaimed, []
        return StepResult(finished, num_prompt_tokens, self.scheduler.stats.num_output_tokens - before)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop requests, wherever they stand; ids of finished ones are ignored. Returns with no step under way.

        Raises:
            StepError: the step that was under way failed.
        """
        with deferred_sigint():
            self.scheduler.abort(request_ids)
            self._collect(0)

    def is_finished(self) -> bool:
        """Whether no request is left, and no step is under way."""
        return self.scheduler.is_finished() and not self._in_flight and not self._unclaimed

    def stats(self) -> dict[str, int]:
        """Counters since the engine began, and the blocks in use now."""
        return {
            **asdict(self.scheduler.stats),
            "num_used_blocks": self.block_manager.num_used_blocks,
            "num_free_blocks": self.block_manager.num_free_blocks,
        }

    def exit(self) -> None:
        """Free the device. The engine cannot be used afterwards; calling it again does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._in_flight.clear()
            runner.exit()

    def __del__(self) -> None:
        # A constructor that raised leaves no runner behind.
        if getattr(self, "_runner", None) is not None:
            self.exit()

    def _queue(self, token_ids: array[int], params: SamplingParams) -> int:
        self._require_open()
        request_id = self._next_request_id
        self._next_request_id += 1
        seed = (self._seed + (request_id + 1) * _GOLDEN_RATIO_64) % 2**64 if params.seed is None else params.seed
        self.scheduler.add(Sequence(request_id, token_ids, params, seed))
        return request_id

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        """Encode texts, all in one call, since tokenizers then use every core."""
        if not texts:
            return []
        if self.tokenizer is None:
            raise ValueError(f"prompt {texts[0][:40]!r} is a string, but the model has no tokenizer: pass token ids")
        try:
            token_ids: list[list[int]] = self.tokenizer(texts)["input_ids"]
        except TypeError as error:
            if len(texts) > 1:
                # Which of them it is shows when each goes alone.
                return [self._tokenize([text])[0] for text in texts]
            raise ValueError(f"prompt {texts[0][:40]!r} cannot be tokenized: {error}") from error
        return token_ids

    def _require_open(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the engine is closed")
        return self._runner

    def _step(self) -> int:
        """Do a step; what it finishes is unclaimed. Returns the prompt tokens that it takes in."""
        runner = self._require_open()
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                self._in_flight.append((batch, runner.launch(batch)))
        except Exception as error:
            # The steps before the one that failed are good.
            self._collect(0)
            raise self._fail(error) from error
        # With nothing launched the pipeline drains: an empty plan still collects the last result.
        self._collect(runner.pipeline_depth if batch is not None else 0)
        if self.scheduler.is_finished():
            # What is still under way computes tokens past an EOS.
            self._collect(0)
        return batch.num_prompt_tokens if batch is not None else 0

    def _collect(self, depth: int) -> None:
        """Take in results until no more than `depth` steps are under way."""
        while len(self._in_flight) > depth:
            batch, handle = self._in_flight.popleft()
            try:
                output = handle.result()
            except Exception as error:
                raise self._fail(error) from error
            for seq in self.scheduler.postprocess(batch, output):
                self._unclaimed.append((seq.seq_id, self._output(seq)))

    def _fail(self, error: Exception) -> StepError:
        """Drop every request in flight, with what they put into the cache; close the engine if the device is lost."""
        self._in_flight.clear()
        failed = self.scheduler.fail_in_flight()
        message = f"a step failed, and with it the requests {failed}: {error}"
        try:
            self._require_open().synchronize()
        except Exception as lost:
            self._runner = None
            message += f"; the engine is closed: {lost}"
        return StepError(message, failed)

    def _output(self, seq: Sequence) -> RequestOutput:
        token_ids = seq.completion_token_ids
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True) if self.tokenizer is not None else ""
        return RequestOutput(
            text=text,
            token_ids=token_ids,
            finish_reason=str(seq.finish_reason),
            num_cached_tokens=seq.num_cached_tokens or 0,
        )
