"""What the handlers share: the engine behind them, and the way from a request's body to its outputs."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from anyio import to_thread

import nanovllm
from nanovllm.client.async_llm import AsyncLLM
from nanovllm.client.request_stream import RequestStream
from nanovllm.config import Pooling
from nanovllm.openai_format import Endpoint, ShownTokens, request_params
from nanovllm.outputs import RequestOutput, TokensPrompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.errors import ApiError, JsonResponse
from nanovllm.serve.event_stream import EventStream
from nanovllm.serve.logs import one_line
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.protocol import MOST_CHOICES, ChatMessage, SamplingBody
from nanovllm.serve.server_counts import ServerCounts
from nanovllm.serve.settings import ServeSettings
from nanovllm.tasks.ranking import Judge, cosines, embeddings, rank_method, text_pairs
from nanovllm.text.answers import AnswerFormat
from nanovllm.text.chat_template import one_conversation

_logger = logging.getLogger(__name__)
_LARGE_ANSWER = 10_000
"""Log-probabilities in an answer that takes so long to build, about 20 ms, that others must not wait for it."""
_SUPPORTED = frozenset({"stream", "echo", "best_of"})


class Service:
    """An engine that answers HTTP requests.

    Args:
        llm: the engine.
        settings: the server's.
        counts: of what the server has at once; its own if there are no other front ends.
        metrics_folder: of the counters of all front ends; None if there are no others.
        created: when the server began; now if None.

    Attributes:
        config: the engine's settings.
        limits: what a request must keep to.
        tokenizer: transformers'; None: the model has none.
        hidden_size: the length of an embedding.
        names: the model's names in the API.
        model: the first of them, which answers have.
        is_ending: whether the server is being shut down, and what runs ends with what it has.
        chat_template: instead of the tokenizer's; None: that.
        device: the name of the device, or devices.
        fingerprint: stands for the version and the engine's settings, by which equal seeds give equal answers.
        created: when the service began, in seconds since 1970.
        metrics: counts requests, times and errors.
        answer_format: how the model writes calls of tools and thoughts.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        settings: ServeSettings,
        counts: ServerCounts | None = None,
        metrics_folder: str | None = None,
        created: int | None = None,
    ) -> None:
        self.llm = llm
        self.settings = settings
        self.config, self.limits, self.tokenizer = llm.llm.config, llm.llm.limits, llm.llm.tokenizer
        self.hidden_size = llm.llm.model_config.hidden_size
        self.names = settings.served_model_name or [Path(self.config.model).name]
        self.model = self.names[0]
        # vLLM's clients name the model as it was given.
        self._accepted = {*self.names, *([] if settings.served_model_name else [self.config.model])}
        self.counts = counts or ServerCounts()
        self.created = int(time.time()) if created is None else created
        self.device = llm.llm.device_name
        self.is_ending = False
        stats = llm.llm.stats()
        cache_config = {
            "block_size": self.config.kvcache_block_size,
            "num_gpu_blocks": stats["num_used_blocks"] + stats["num_free_blocks"],
            "enable_prefix_caching": self.config.enable_prefix_caching,
            "gpu_memory_utilization": self.config.gpu_memory_utilization,
        }
        self.metrics = Metrics(llm.llm.stats, self.model, cache_config, llm.llm.step_histograms, metrics_folder)
        self.chat_template = settings.template_text()
        settled = f"{nanovllm.__version__} {self.config}"
        self.fingerprint = f"fp_{sha256(settled.encode()).hexdigest()[:10]}"
        # Where a request does not say.
        self._defaults = llm.llm.recommended_values()
        reasoning = settings.reasoning_parser or "auto"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.answer_format = AnswerFormat(self.tokenizer, settings.tool_call_parser, reasoning, self.chat_template)
        for warning in told:
            _logger.warning("%s", warning.message)
        template = getattr(self.tokenizer, "apply_chat_template", None)
        reserved = {"self", *inspect.signature(template).parameters} if template else set()
        # A variable that requests have a field for.
        self._reserved = reserved - {"kwargs", "documents"}

    def check_model(self, model: str | None) -> None:
        """Raise if a request is for another model."""
        if model is not None and model not in self._accepted:
            message = f"the model {model!r:.80} does not exist; this server has {self.model!r}"
            raise ApiError(404, message, "model", code="model_not_found")

    def describe(self, name: str) -> dict[str, Any]:
        """Return what the API says of the model, under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "nanovllm",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self.limits.max_model_len,
        }

    def sampling_params(self, body: SamplingBody, endpoint: Endpoint) -> SamplingParams:
        """Return a request's sampling parameters.

        Raises:
            ValueError: a value out of range, or what is not supported.
        """
        if body.stream and body.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed")
        given = body.model_dump(exclude_none=True, by_alias=True)
        return self.limited(request_params(given, endpoint, recommended=self._defaults, supported=_SUPPORTED))

    def shown_tokens(self, body: SamplingBody) -> ShownTokens:
        """Return what a request wants to see of tokens."""
        return ShownTokens.of(body.model_dump(exclude_none=True), self.llm.llm.output_processor.token_bytes)

    def limited(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters within the server's limits.

        Raises:
            ValueError, ApiError: the request asks for more.
        """
        most = self.settings.max_output_tokens
        if most is not None:
            if params.max_tokens is None:
                params.max_tokens = most
            if params.max_tokens > most:
                raise ValueError(f"max_tokens={params.max_tokens} is over the server's {most} (max_output_tokens)")
        self.check_num_outputs(params.n)
        structured = params.structured_outputs
        if structured is not None and structured.choice is not None and len(structured.choice) > MOST_CHOICES:
            message = f"structured_outputs.choice: {len(structured.choice)} texts are over {MOST_CHOICES}"
            raise ApiError(400, message, "structured_outputs.choice", code="invalid_value")
        return params

    def check_num_outputs(self, count: int) -> None:
        """Raise if a request asks for more outputs than the server allows."""
        if count > self.settings.max_outputs:
            raise ValueError(f"{count} outputs are over the server's {self.settings.max_outputs} (max_outputs)")

    async def render_chat(
        self, messages: list[ChatMessage], template: Mapping[str, Any] | None = None, **options: Any
    ) -> list[int]:
        """Return the token ids of messages.

        Args:
            messages: the conversation.
            template: variables of the chat template, from the client.
            options: of `AsyncLLM.render_chat`.

        Raises:
            ValueError: the messages do not fit the model's template.
        """
        refused = sorted(self._reserved & set(template or {}))
        if refused:
            raise ValueError(f"chat_template_kwargs must not have {refused[0]!r}")
        plain = await self.llm.run_beside(partial(_plain, messages))
        variables = {**(self.settings.default_chat_template_kwargs or {}), **(template or {})}
        if options.get("chat_template") is not None:
            # A program: one that takes minutes, or gigabytes, would hold up everybody's.
            raise ValueError("chat_template: a template comes with the server (--chat-template), not with a request")
        options["chat_template"] = self.chat_template
        return await self.llm.render_chat(plain, chat_template_kwargs=variables, **options)

    async def encode(self, prompts: list[Any], body: SamplingBody, params: SamplingParams) -> list[TokensPrompt]:
        """Return the prompts of a request as token ids."""
        options: dict[str, Any] = {"max_prompt_tokens": self.max_prompt_tokens(body, params)}
        options["add_special_tokens"] = body.add_special_tokens is not False
        return [self.salted(prompt, body) for prompt in await self.llm.encode(prompts, **options)]

    def salted(self, prompt: TokensPrompt, body: SamplingBody) -> TokensPrompt:
        """Return a prompt with the salt of its request."""
        return prompt if body.cache_salt is None else {**prompt, "cache_salt": body.cache_salt}

    def max_prompt_tokens(self, body: SamplingBody, params: SamplingParams) -> int | None:
        """Return how many tokens of its prompts a request keeps; None: all.

        Raises:
            ValueError: they are more than the model has room for.
        """
        wanted, most = body.truncate_prompt_tokens, self.limits.max_model_len
        if wanted is not None and wanted > most:
            raise ValueError(f"truncate_prompt_tokens={wanted} is over max_model_len={most}")
        return max(1, most - (params.max_tokens or 1)) if wanted == -1 else wanted

    def check_room(self, prompts: list[TokensPrompt], max_tokens: int | None, param: str) -> None:
        """Raise if the model has no room for prompts and the tokens that their request asks for.

        Args:
            prompts: from `encode`.
            max_tokens: if the request says so; what is a default is cut to the room.
            param: the field of the prompts.
        """
        most = self.limits.max_model_len
        length = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
        if length + (max_tokens or 0) > most:
            asked = f" and max_tokens={max_tokens}" if max_tokens else ""
            message = f"{length} tokens of the prompt{asked} are over max_model_len={most}"
            raise ApiError(400, message, param, code="context_length_exceeded")

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(token_ids))

    async def begin(self, prompts: list[Any], params: SamplingParams, priority: int | None) -> list[RequestStream]:
        """Queue requests; all of them or none."""
        self._check_request(prompts, params, priority)
        return await self.llm.begin_streams(prompts, params, priority=priority or 0)

    async def complete(self, prompts: list[Any], params: SamplingParams, priority: int | None) -> list[RequestOutput]:
        """Return the whole outputs of prompts; they are aborted if this is cancelled or one of them fails."""
        self._check_request(prompts, params, priority)
        try:
            outputs = await self.llm.generate_all(prompts, params, priority=priority or 0)
        except asyncio.CancelledError:
            self.metrics.count_aborted(len(prompts))
            raise
        for output in outputs:
            self._observe(output)
        return outputs

    async def embed(
        self, prompts: list[Any], pooling: Pooling | None, priority: int | None
    ) -> tuple[torch.Tensor, list[RequestOutput]]:
        """Return the embeddings of prompts, [num_prompts, hidden_size] float32, and what they were made of."""
        self._check_request(prompts, SamplingParams(max_tokens=1), priority)
        try:
            outputs = await self.llm.pool(prompts, pooling, priority=priority or 0)
        except asyncio.CancelledError:
            self.metrics.count_aborted(len(prompts))
            raise
        for output in outputs:
            self._observe(output)
        return embeddings(outputs, self.hidden_size), outputs

    async def relevance(
        self, queries: list[str], documents: list[str], pooling: Pooling | None, priority: int | None
    ) -> tuple[list[float], list[RequestOutput]]:
        """Return how relevant each document is to its query, or to the only one, and what tells it; see `LLM.rank`."""
        pairs = text_pairs(queries, documents)
        if rank_method(None, self.config.model) == "embedding":
            vectors, outputs = await self.embed([*queries, *documents], pooling, priority)
            return cosines(vectors, len(queries)), outputs
        judge = Judge(self.llm.llm.input_processor)
        outputs = await self.complete(judge.prompts(pairs), judge.params, priority)
        return judge.scores(outputs), outputs

    def _check_request(self, prompts: list[Any], params: SamplingParams, priority: int | None) -> None:
        """Raise if a request asks for more than the server gives to one; log it otherwise."""
        if priority and not self.settings.allow_priority:
            raise ValueError(f"priority={priority}: this server does not let requests choose it (allow_priority)")
        longest = self.limits.max_model_len
        # A text has at least as many characters as tokens.
        lengths = [min(_length(prompt), longest) for prompt in prompts]
        num_tokens = len(prompts) * params.n * min(params.max_tokens or longest, longest)
        at_output, at_prompt = map(self.limits.num_logprobs, (params.logprobs, params.prompt_logprobs))
        count = 0 if at_output is None else num_tokens * (at_output + 1)
        count += 0 if at_prompt is None else sum(lengths) * (at_prompt + 1)
        most = self.settings.max_logprobs_per_request
        if count > most:
            message = f"up to {count} log-probabilities are over the server's {most} (max_logprobs_per_request)"
            raise ValueError(f"{message}: ask for fewer of them, or give a smaller max_tokens or n")
        for _ in prompts:
            self.metrics.observe_params(params)
        if self.settings.log_requests:
            _logger.info("%d prompts, at most %d tokens: %s", len(prompts), sum(lengths), one_line(repr(params)))

    def _observe(self, output: RequestOutput, num_tokens: int | None = None) -> None:
        """Count a finished request, and log it; see `Metrics.observe`."""
        self.metrics.observe(output, num_tokens)
        if self.settings.log_requests:
            reasons = [choice.finish_reason for choice in output.outputs]
            _logger.info("%d prompt tokens, ended: %s, %s", len(output.prompt_token_ids), reasons, output.metrics)

    async def json_answer(
        self, build: Callable[[], Any], outputs: list[RequestOutput], params: SamplingParams
    ) -> JsonResponse:
        """Return the answer whose body is built of outputs; a large one is built in a thread.

        Args:
            build: returns the body.
            outputs: what it is built of.
            params: what was asked for.
        """
        choices = [choice for output in outputs for choice in output.outputs]
        count = sum(len(choice.logprobs or ()) for choice in choices) * (1 + (params.logprobs or 0))
        count += sum(len(output.prompt_logprobs or ()) for output in outputs) * (1 + (params.prompt_logprobs or 0))
        if count < _LARGE_ANSWER:
            return JsonResponse(build())
        return await to_thread.run_sync(lambda: JsonResponse(build(), in_pieces=True))

    def event_stream(self, events: AsyncIterator[bytes], streams: list[RequestStream]) -> EventStream:
        """Return the answer that sends events made of streams."""
        return EventStream(events, streams, self.settings, self.metrics.count_error)

    async def read(self, streams: list[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield what is new in any stream, with its index."""
        counts: dict[tuple[int, int], int] = {}
        num_finished = 0
        try:
            async for index, output in _merged(streams):
                for choice in output.outputs:
                    counts[index, choice.index] = counts.get((index, choice.index), 0) + len(choice.token_ids)
                if output.finished:
                    num_finished += 1
                    own = (counts[index, choice.index] for choice in output.outputs)
                    self._observe(output, max(own, default=0))
                yield index, output
        except (GeneratorExit, asyncio.CancelledError):
            self.metrics.count_aborted(len(streams) - num_finished)
            raise

    def state(self) -> dict[str, Any]:
        """Return the engine's state for the page; waits for an engine in another process."""
        stats, sample = self.llm.llm.stats(), self.llm.llm.stats_history()[-1]
        head = {"model": self.model, "device": self.device}
        return {**head, **sample._asdict(), "num_preemptions": stats["num_preemptions"]}


def _length(prompt: Any) -> int:
    return len(prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt)


def _plain(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates know them."""
    plain = one_conversation([message.model_dump(exclude_unset=True) for message in messages])
    for message in plain:
        # Most templates have no developer, and drop what it says.
        if message["role"] == "developer":
            message["role"] = "system"
    return plain


async def _merged(streams: list[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, output = waiting.pop(task), task.result()
                if not output.finished:
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
