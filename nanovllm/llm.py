"""What a user holds: an engine that loads a model and answers lists of prompts."""

from __future__ import annotations

import os
import time
import warnings
from array import array
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from tqdm.auto import tqdm
from transformers import AutoTokenizer

from nanovllm.config import Config
from nanovllm.engine.call_guard import Call
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.kernels.compilers import Compilers
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import RequestOutput, StepResult
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.input_processor import InputProcessor
from nanovllm.text.output_processor import OutputProcessor
from nanovllm.utils.checks import refuse_remote_code
from nanovllm.utils.hub import resolve_model
from nanovllm.utils.interrupt import deferred_signals
from nanovllm.workers.parallel_runner import ParallelRunner, start_ranks

Self = TypeVar("Self", bound="LLM")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


class LLM:
    """A language model, ready to generate: an `LLMEngine` behind a tokenizer.

    Args:
        model: a folder in the Hub's layout, or a Hub id, which is fetched unless `HF_HUB_OFFLINE` forbids it.
        kwargs: the fields of `nanovllm.config.Config`.

    Raises:
        ValueError: an unknown argument, one out of its range, or a model that cannot be had or is not supported.
        RuntimeError: of several ranks one failed, or this process has an engine of several ranks already.
    """

    def __init__(self, model: str | os.PathLike[str], **kwargs: Any) -> None:
        self.config = config = Config(os.fspath(model), **kwargs)
        # The compilers come first: what follows begins CUDA, and threads.
        with Compilers(config.device) as compilers, start_ranks(config) as ranks:
            folder = resolve_model(config.model, config.revision, weights=config.load_format != "dummy")
            self.model_config = model_config = ModelConfig.from_folder(folder, config.trust_remote_code)
            max_model_len = min(config.max_model_len, model_config.max_position)
            if max_model_len < config.max_model_len:
                warnings.warn(
                    f"max_model_len={config.max_model_len} is capped: the model has {max_model_len}", stacklevel=2
                )
            self.tokenizer = _load_tokenizer(folder, config.trust_remote_code)
            make_runner = ModelRunner if ranks is None else partial(ParallelRunner, ranks)
            runner = make_runner(config, model_config, folder, max_model_len=max_model_len, compilers=compilers)
        self._output_processor = OutputProcessor(self.tokenizer)
        tokenizer_eos = getattr(self.tokenizer, "eos_token_id", None)
        self.llm_engine = LLMEngine(
            config,
            runner,
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model_config.eos_token_ids | frozenset([] if tokenizer_eos is None else [tokenizer_eos]),
            decode=self._output_processor.decode,
        )
        self._input_processor = InputProcessor(self.tokenizer, self.llm_engine.limits)

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: texts, or token ids; a single text is a list of one.
            sampling_params: one for all prompts, or one each; the defaults if None.
            use_tqdm: show a progress bar.

        Returns:
            The `RequestOutput` of each prompt, in order.

        Raises:
            ValueError: any of the prompts or parameters is out of bounds; none was begun.
            StepError: a step failed, and with it requests of this call; it is a RuntimeError.
            RuntimeError: another `generate` or `step` of this engine is running, or the engine is closed.
            KeyboardInterrupt: after a step; the requests of this call are dropped, the engine stays usable.
        """
        self.llm_engine.require_open()
        if not isinstance(prompts, (str, list, tuple)):
            raise ValueError(f"prompts must be a string or a list, not {type(prompts).__name__}")
        requests: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        params = _one_each(sampling_params, len(requests))
        call = Call()
        try:
            self.llm_engine.begin(call)
            return self._run(self._input_processor.process(requests, params), params, use_tqdm)
        finally:
            self.llm_engine.end(call)

    def add_request(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> int:
        """Queue a request and return its id; see `LLMEngine.add_request`."""
        params = SamplingParams() if sampling_params is None else sampling_params
        (token_ids,) = self._input_processor.process([prompt], [params])
        return self.llm_engine.enqueue(token_ids, params)

    def step(self) -> StepResult:
        """Do one step of the engine; see `LLMEngine.step`."""
        return self.llm_engine.step()

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop requests; see `LLMEngine.abort`."""
        self.llm_engine.abort(request_ids)

    def is_finished(self) -> bool:
        """Whether no request is left, and every result has been returned."""
        return self.llm_engine.is_finished()

    def stats(self) -> dict[str, int]:
        """Counters since the engine began, and the blocks in use now."""
        return self.llm_engine.stats()

    def exit(self) -> None:
        """Free the device; see `LLMEngine.exit`."""
        self.llm_engine.exit()

    def _run(self, token_ids: list[array[int]], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        """Queue requests and step until they are done; on any exception drop them."""
        engine, ids = self.llm_engine, []
        try:
            # Deferred, so that the id of every queued request is known.
            with deferred_signals():
                for tokens, param in zip(token_ids, params, strict=True):
                    ids.append(engine.enqueue(tokens, param))
            outputs = self._step_until_done(set(ids), use_tqdm)
        except BaseException:
            engine.drop(set(ids))
            raise
        return [outputs[request_id] for request_id in ids]

    def _step_until_done(self, ids: set[int], use_tqdm: bool) -> dict[int, RequestOutput]:
        """Return the outputs of requests `ids`; other requests' results stay for their callers."""
        engine, outputs = self.llm_engine, dict[int, RequestOutput]()
        started, num_tokens = time.perf_counter(), engine.scheduler.stats.num_output_tokens
        with tqdm(total=len(ids), desc="Generating", unit="request", dynamic_ncols=True, disable=not use_tqdm) as bar:
            while len(outputs) < len(ids):
                engine.run_step()
                done = engine.claim(ids)
                outputs.update(done)
                if done:
                    rate = (engine.scheduler.stats.num_output_tokens - num_tokens) / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
                    bar.update(len(done))
        return outputs

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.exit()


def _load_tokenizer(folder: str, trust_remote_code: bool) -> Any:
    if not any(os.path.isfile(os.path.join(folder, name)) for name in _TOKENIZER_FILES):
        return None
    if not trust_remote_code:
        refuse_remote_code(folder, "tokenizer_config.json", "AutoTokenizer")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"the tokenizer in {folder!r} cannot be read: {error}") from error


def _one_each(params: SamplingParams | list[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)):
        raise ValueError(f"sampling_params must be SamplingParams, or a list of them, not {params!r}")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one for all, or one each")
    return list(params)
