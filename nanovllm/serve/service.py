"""Connects HTTP handlers to the engine: their routes, requests within the server's limits, and outputs."""

from __future__ import annotations

import asyncio
import inspect
import logging
import mmap
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive

import nanovllm
from nanovllm.client.async_llm import AsyncLLM
from nanovllm.client.engine_client import RequestState
from nanovllm.client.engine_thread import RequestStream
from nanovllm.engine.request import PromptTooLongError, Request
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.errors import ApiError, parse_json, sent_names
from nanovllm.serve.logs import one_line
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.openai_format import ShownTokens, request_params, template_values
from nanovllm.serve.protocol import MOST_CHOICES, ChatBody, ChatMessage, SamplingBody, TokenizeBody
from nanovllm.serve.settings import ServerCounts, ServeSettings, SharedServer
from nanovllm.text.answers import AnswerFormat
from nanovllm.text.chat_template import one_conversation, render_text, template_options
from nanovllm.text.input_processor import work_of

_logger = logging.getLogger(__name__)
_CONTENTS = {"messages", "prompt", "tools", "documents", "chat_template_kwargs"}
_TEMPLATE_FIELDS = {"chat_template_kwargs", "documents", "reasoning_effort"}
Template = Callable[[list[ChatMessage]], str]
Result = TypeVar("Result")


class Service:
    """An engine that answers HTTP requests, alone or `shared` with other front ends.

    Attributes:
        names: the model's names in the API; `model`, the first one, is used in answers.
        chat_template: a chat template that replaces the tokenizer's, or None.
        fingerprint: hash of the version and the engine's settings; equal fingerprints and seeds give equal answers.
        answer_format: the model's format of tool calls and reasoning.
    """

    def __init__(self, llm: AsyncLLM, settings: ServeSettings, shared: SharedServer | None = None) -> None:
        self.llm, self.settings = llm, settings
        self.config, self.limits, self.tokenizer = llm.llm.config, llm.llm.limits, llm.llm.tokenizer
        self.names = settings.served_model_name or [Path(self.config.model).name]
        self.model = self.names[0]
        # vLLM's clients use the model's name as given on the command line.
        self._accepted = {*self.names, *([] if settings.served_model_name else [self.config.model])}
        self.counts, folder = ServerCounts(), None
        if shared is not None:
            self.counts = ServerCounts(mmap.mmap(shared.counts, 0), shared.index)
            folder = shared.metrics_folder
        stats = llm.llm.stats()
        cache_config = {
            "block_size": self.config.kvcache_block_size,
            "num_gpu_blocks": stats["num_used_blocks"] + stats["num_free_blocks"],
            "enable_prefix_caching": self.config.enable_prefix_caching,
            "gpu_memory_utilization": self.config.gpu_memory_utilization,
        }
        self.metrics = Metrics(llm.llm.stats, self.model, cache_config, llm.llm.step_histograms, folder)
        llm.on_begin, llm.on_end = self._note_begin, self._note_end
        self.chat_template = settings.template_text()
        settled = f"{nanovllm.__version__} {self.config}"
        self.fingerprint = f"fp_{sha256(settled.encode()).hexdigest()[:10]}"
        # The default for requests.
        self._defaults = llm.llm.recommended_values()
        reasoning = settings.reasoning_parser or "auto"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.answer_format = AnswerFormat(self.tokenizer, settings.tool_call_parser, reasoning, self.chat_template)
        for warning in told:
            _logger.warning("%s", warning.message)
        template = getattr(self.tokenizer, "apply_chat_template", None)
        reserved = {"self", *inspect.signature(template).parameters} if template else set()
        # This variable has its own field in requests.
        self._reserved = reserved - {"kwargs", "documents"}

    def check_model(self, model: str | None) -> None:
        """Raise if a request is for another model."""
        if model is not None and model not in self._accepted:
            problem = f"the model {model!r:.80} does not exist; this server has {self.model!r}"
            raise ApiError(404, problem, "model", code="model_not_found")

    def sampling_params(self, body: SamplingBody) -> SamplingParams:
        """Return a request's sampling parameters; ValueError if a value is out of range or not supported."""
        if body.stream and body.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed")
        given = body.model_dump(exclude=_CONTENTS, exclude_none=True, by_alias=True)
        return request_params(given, is_chat=isinstance(body, ChatBody), recommended=self._defaults)

    def shown_tokens(self, body: SamplingBody) -> ShownTokens:
        """Return a request's options for showing tokens."""
        return ShownTokens.of(vars(body), self.llm.llm.output_processor.token_bytes)

    def template(self, body: ChatBody | TokenizeBody, tools: list[dict[str, Any]] | None) -> Template:
        """Return a function that renders messages; ValueError for a template or for reserved variables."""
        if body.chat_template is not None:
            # A template is a program that could take minutes or gigabytes.
            raise ValueError("chat_template: a template comes with the server (--chat-template), not with a request")
        given = template_values(body.model_dump(include=_TEMPLATE_FIELDS, exclude_none=True))
        refused = sorted(self._reserved & given.keys())
        if refused:
            raise ValueError(f"chat_template_kwargs must not have {refused[0]!r}")
        options = template_options(
            {
                "add_generation_prompt": body.add_generation_prompt is not False,
                "continue_final_message": bool(body.continue_final_message),
                "chat_template": self.chat_template,
                "chat_template_kwargs": {**(self.settings.default_chat_template_kwargs or {}), **given},
                "tools": tools,
            }
        )
        return lambda messages: render_text(self.tokenizer, _plain(messages), **options)

    async def encode(self, prompt: Any, add_special_tokens: bool | None, template: Template | None) -> list[int]:
        """Return the token ids of a text, or of messages with `template`; ValueError if that fails or is too long."""
        encode = partial(self.llm.llm.input_processor.encode, [prompt], add_special_tokens, template=template)
        (found,) = await self.llm.run_beside(encode, work_of([_as_text(prompt)], None))
        return list(found["prompt_token_ids"])

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(token_ids))

    async def submit(
        self, prompts: list[Any], params: SamplingParams, body: SamplingBody,
        *, template: Template | None = None, max_tokens: int | None = None,
    ) -> list[RequestStream]:  # fmt: skip
        """Queue requests for all prompts, or raise a ValueError or ApiError if one is out of bounds.

        Args:
            prompts: texts, lists of token ids, or conversations, which `template` renders.
            params: sampling parameters of all.
            body: the request, with encoding options, priority, and whether to stream.
            max_tokens: output tokens for which the model must have room; None reduces `params` to the available room.
        """
        params, priority = self._limited(params, len(prompts)), self.priority(body.priority)
        count, longest, most = len(prompts), self.limits.max_model_len, body.truncate_prompt_tokens
        if most is not None and most > longest:
            raise ValueError(f"truncate_prompt_tokens={most} is over max_model_len={longest}")
        if most == -1:
            most = max(1, longest - (params.max_tokens or 1))

        def process() -> list[Request]:
            requests = self.llm.llm.input_processor.process(
                prompts,
                [params] * count,
                [priority] * count,
                streams=bool(body.stream),
                template=template,
                add_special_tokens=body.add_special_tokens,
                max_prompt_tokens=most,
            )
            for request in requests:
                request.cache_salt = body.cache_salt
                # Only completions show the prompt's text.
                request.prompt = request.prompt if template is None else None
            self._check_size(requests, max_tokens)
            return requests

        return await self.llm.enqueue(count, process, work_of([*map(_as_text, prompts)], params))

    def _limited(self, params: SamplingParams, num_prompts: int) -> SamplingParams:
        """Return sampling parameters with the server's `max_output_tokens` as the default, or raise over a limit."""
        if (count := params.n * num_prompts) > self.settings.max_outputs:
            raise ValueError(f"{count} outputs are over the server's {self.settings.max_outputs} (max_outputs)")
        most, structured = self.settings.max_output_tokens, params.structured_outputs
        if most is not None and (params.max_tokens or 0) > most:
            raise ValueError(f"max_tokens={params.max_tokens} is over the server's {most} (max_output_tokens)")
        if structured is not None and structured.choice is not None and len(structured.choice) > MOST_CHOICES:
            raise ValueError(f"structured_outputs.choice: {len(structured.choice)} texts are over {MOST_CHOICES}")
        return replace(params, max_tokens=most) if params.max_tokens is None else params

    def _check_size(self, requests: list[Request], max_tokens: int | None) -> None:
        """Raise if the model has no room for `max_tokens`, or if there are too many log-probabilities."""
        params, longest = requests[0].params, self.limits.max_model_len
        lengths = [len(request.token_ids) for request in requests]
        if max(lengths) + (max_tokens or 0) > longest:
            problem = f"the prompt's {max(lengths)} tokens and max_tokens={max_tokens} are over"
            raise PromptTooLongError(f"{problem} max_model_len={longest}")
        num_tokens = len(requests) * params.n * min(params.max_tokens or longest, longest)
        count = 0 if params.logprobs is None else num_tokens * (params.logprobs + 1)
        count += 0 if params.prompt_logprobs is None else sum(lengths) * (params.prompt_logprobs + 1)
        if count > (most := self.settings.max_logprobs_per_request):
            problem = f"up to {count} log-probabilities are over the server's {most} (max_logprobs_per_request)"
            raise ValueError(f"{problem}: ask for fewer of them, or give a smaller max_tokens or n")

    def priority(self, given: int | None) -> int:
        """Return a request's priority; ValueError if requests may not choose it."""
        if given and not self.settings.allow_priority:
            raise ValueError(f"priority={given}: this server does not let requests choose it (allow_priority)")
        return given or 0

    def _note_begin(self, request: Request) -> None:
        """Count and log a request to the engine."""
        self.metrics.observe_params(request.params)
        if self.settings.log_requests:
            _logger.info("a prompt of %d tokens: %s", len(request.token_ids), one_line(repr(request.params)))

    def _note_end(self, state: RequestState) -> None:
        """Count and log a finished request, or count one whose client has gone; failed steps are counted as errors."""
        output = state.output
        if output is not None:
            self.metrics.observe(output, state.num_tokens)
            if self.settings.log_requests:
                reasons = [choice.finish_reason for choice in output.outputs]
                _logger.info("%d prompt tokens, ended: %s, %s", len(output.prompt_token_ids), reasons, output.metrics)
        elif state.error is None:
            self.metrics.count_aborted()


def _as_text(prompt: Any) -> Any:
    """Return a prompt, or for a conversation a text of about its length."""
    is_conversation = isinstance(prompt, list) and isinstance(prompt[0], ChatMessage)
    return str(prompt) if is_conversation else prompt


def _plain(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates support."""
    plain = one_conversation([message.model_dump(exclude_unset=True) for message in messages])
    for message in plain:
        # Most templates drop messages with the role `developer`.
        if message["role"] == "developer":
            message["role"] = "system"
    return plain


async def merged(streams: list[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield new parts of all streams, each with its stream's index."""
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
        await _cancel(*waiting)


async def until_disconnect(receive: Receive, work: Awaitable[Result], seconds: float) -> Result:
    """Return the result of a coroutine, cancelled by ClientDisconnect or, after `seconds`, an ApiError."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientDisconnect
        raise ApiError(408, f"the request took longer than {seconds} s (max_request_seconds)")
    finally:
        await _cancel(task, gone)
        # The traceback of an error holds this frame, and so would keep the task, the error and the request's body.
        del task, gone


async def _disconnect(receive: Receive) -> None:
    """Wait until the client disconnects, after its request was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for them; their errors are handled or irrelevant."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _JsonRequest(HttpRequest):
    """A request whose body is parsed by `parse_json`; its scope then has `sent_names`, for errors."""

    async def json(self) -> Any:
        """Return the body's value."""
        value = parse_json(await self.body())
        self.scope["names"] = sent_names(self.scope["route"].names, value)
        return value


class BodyRoute(APIRoute):
    """A route whose requests drop their cached body before a streamed answer ends; `names`: see `sent_names`.

    Unless `is_limited` is false, they end when their client disconnects or a time limit passes before a stream begins.
    """

    is_limited = True
    names: Mapping[str, Sequence[str]] = {}

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handle = super().get_route_handler()

        async def answer(given: HttpRequest) -> Response:
            request = _JsonRequest(given.scope, given.receive)
            if not self.is_limited:
                return await handle(request)
            # Later messages tell of a disconnect.
            await request.body()
            settings: ServeSettings = request.app.state.service.settings
            return await until_disconnect(request.receive, handle(request), settings.max_request_seconds)

        return answer


async def _service(request: HttpRequest) -> Service:
    return cast(Service, request.app.state.service)


ServiceDep = Annotated[Service, Depends(_service)]


def make_router(**api_names: Sequence[str]) -> APIRouter:
    """Return a router of requests with limits; `api_names`: see `sent_names`."""
    # A class, since FastAPI makes an included router's routes anew by their type.
    route: Any = type("NamedRoute", (BodyRoute,), {"names": api_names})
    return APIRouter(route_class=route)
