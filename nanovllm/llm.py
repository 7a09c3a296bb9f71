"""User interface: loads a model and completes, scores, embeds and streams prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from nanovllm.client.engine_client import News, RequestState
from nanovllm.client.jobs import Done, Job, JobRun, Progress, Schedule, as_prompts, check_priorities, expand_params
from nanovllm.client.loading import load_model
from nanovllm.client.model_client import EngineSettings, ModelClient
from nanovllm.config import Config, Pooling
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from nanovllm.text.chat_template import (
    ChatTemplateOptions,
    Message,
    conversation_source,
    one_conversation,
    render_text,
    template_options,
)
from nanovllm.text.input_processor import Prompts, TokenIds, pooling_params
from nanovllm.utils.checks import check_bool
from nanovllm.utils.display import format_count

if TYPE_CHECKING:
    # Part of `typing` since Python 3.11.
    from typing_extensions import Unpack

    from nanovllm.tasks.beam_search import BeamSearch, BeamSearchOutput
    from nanovllm.tasks.ranking import RankBy, RankedDocument
    from nanovllm.tasks.scoring import ScoreOutput

Self = TypeVar("Self", bound="LLM")


class LLM(ModelClient):
    """A loaded language model: one engine or several replicas, with a tokenizer.

    Args:
        model: a folder in the Hub's layout, a GGUF file, which is converted once, or a Hub id, which is downloaded
            unless `HF_HUB_OFFLINE` is set.
        kwargs: settings described in `nanovllm.config.Config`: `dtype`, `device`, `max_model_len`,
            `gpu_memory_utilization`, `tensor_parallel_size`, `data_parallel_size`, `max_num_seqs`, `seed`, and more.

    Raises:
        ValueError: an unknown or invalid argument, or a model that is not available or not supported.
        RuntimeError: a rank failed.

    Example:
        >>> from nanovllm.assets import BUNDLED_MODEL
        >>> with LLM(BUNDLED_MODEL, max_model_len=512) as llm:
        ...     print(llm.chat([{"role": "user", "content": "2 + 3"}])[0].outputs[0].text)
        5
    """

    def __init__(self, model: str | os.PathLike[str], **kwargs: Unpack[EngineSettings]) -> None:
        config = Config(os.fspath(model), **kwargs)
        super().__init__(config, load_model(config))

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
        on_error: Literal["raise", "return"] = "raise",
        keep: bool = True,
        schedule: Schedule = "prefix",
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: texts, token ids (lists, tuples, arrays or tensors), or dicts of either (`TextPrompt`,
                `TokensPrompt`); a single text or dict is a list of one. Any other iterable of prompts, such as a
                generator, is read in a separate thread, a few thousand prompts ahead.
            sampling_params: one object for all prompts, or a list with one for each; None: the defaults.
            use_tqdm: show a progress bar.
            priority: of each prompt in a list; lower numbers run first, ties are ordered by `schedule`.
            on_output: called with each output as it finishes.
            on_error: "raise" drops all requests if a prompt is invalid or its step fails; "return" gives such a prompt
                an output with an `error`, and continues.
            keep: whether to return outputs; otherwise only `on_output` gets them, and they are not stored.
            schedule: "prefix" sorts prompts of equal priority (by texts, if there are more than a thousand; of other
                iterables each thousand), so that equal prefixes share even a small cache; "arrival" keeps the given
                order. A prompt's random numbers depend only on its position in `prompts`.

        Returns:
            The outputs in the order of the prompts; an empty list unless `keep`.

        Raises:
            ValueError: a prompt or parameter is invalid. With up to a thousand prompts, nothing was started.
            StepError: a step failed, and with it requests of this call; a subclass of RuntimeError.
            RuntimeError: another `generate` or `step` of this engine is running, or the engine is closed.
            KeyboardInterrupt: raised after a step; the requests of this call are dropped, the engine stays usable.

        Example:
            >>> outputs = llm.generate(["Hello", "The sea"], SamplingParams(temperature=0.6, max_tokens=8))
            >>> [len(output.outputs[0].token_ids) <= 8 for output in outputs]
            [True, True]
        """
        job = Job(self.input_processor, prompts, sampling_params, priority, schedule=schedule)
        return self._run(job, use_tqdm, on_error=on_error, on_output=on_output, keep=keep)

    def chat(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
        on_error: Literal["raise", "return"] = "raise",
        keep: bool = True,
        schedule: Schedule = "prefix",
        **template: Unpack[ChatTemplateOptions],
    ) -> list[RequestOutput]:
        """Answer conversations, rendered with the tokenizer's chat template.

        Args:
            messages: a conversation, a list of dicts with `role` and `content` (text, or OpenAI's parts of type text);
                or an iterable of conversations.
            sampling_params, use_tqdm, priority, on_output, on_error, keep, schedule: see `generate`.
            template: see `ChatTemplateOptions`. With `tools`, the calls in an answer are its `tool_calls`.

        Raises:
            ValueError: the messages do not fit the template, an unknown keyword, or see `generate`.

        Example:
            >>> llm.chat([{"role": "user", "content": "Hello"}])[0].outputs[0].text
            'Hello! How can I help you?'
        """
        options, answer = template_options(template), self.answer_options(template)

        def finish(place: int, output: RequestOutput) -> None:
            if answer is not None:
                given: Any = sampling_params[place] if isinstance(sampling_params, (list, tuple)) else sampling_params
                answer.complete(output, given)

        job = Job(
            self.input_processor,
            conversation_source(messages),
            sampling_params if answer is None else answer.kept_tags(sampling_params),
            priority,
            schedule=schedule,
            template=lambda conversation: render_text(self.tokenizer, one_conversation(conversation), **options),
        )
        return self._run(job, use_tqdm, on_error=on_error, on_output=on_output, keep=keep, finish=finish)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Complete prompts, and yield new output after each step.

        Outputs have only new text, tokens and log-probabilities. A request's last one is `finished`, and has the finish
        reasons, the prompt's log-probabilities and the metrics. Closing the generator aborts requests. See `generate`.

        Example:
            >>> for output in llm.stream("1, 2", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)):
            ...     print(len(output.outputs[0].token_ids), output.finished)
            1 False
            1 True
        """
        self.require_ready()
        given = list(as_prompts(prompts))
        params, priorities = expand_params(sampling_params, len(given)), check_priorities(priority, len(given))
        processed = self.input_processor.process(given, params, priorities, streams=True)
        return self.engine_client.stream([RequestState(request, self.output_processor) for request in processed])

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        **template: Unpack[ChatTemplateOptions],
    ) -> Generator[RequestOutput, None, None]:
        """Answer conversations, and yield new output after each step; see `chat` and `stream`.

        Example:
            >>> for output in llm.stream_chat([{"role": "user", "content": "count to 5"}]):
            ...     print(output.outputs[0].text, end="")
            1, 2, 3, 4, 5
        """
        answer, options = self.answer_options(template), template_options(template)
        params = sampling_params if answer is None else answer.kept_tags(sampling_params)
        conversations = map(one_conversation, conversation_source(messages))
        prompts = [self.input_processor.render_chat(conversation, options) for conversation in conversations]
        return self.stream(prompts, params, priority=priority)

    def _run(
        self, job: Job, use_tqdm: bool,
        *, on_error: Literal["raise", "return"] = "raise", on_output: Callable[[RequestOutput], None] | None = None,
        keep: bool = True, finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Run a job; `finish` completes each output first, given its index. See `generate`."""
        check_bool("keep", keep)
        if not keep and on_output is None:
            raise ValueError("keep=False needs on_output: the outputs would be lost")
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', not {on_error!r}")
        self.require_ready()
        outputs: dict[int, RequestOutput] = {}

        def deliver(done: Done) -> None:
            for item, output in done:
                if finish is not None:
                    finish(item.index, output)
                if keep:
                    outputs[item.index] = output
            if on_output is not None:
                for _, output in done:
                    on_output(output)

        client = self.engine_client
        progress = Progress(client.engine, job.num_prompts, "request", disable=not use_tqdm)
        JobRun(client, job.read(), deliver, progress, self.most_pending, on_error == "return").run()
        return [outputs[index] for index in range(len(outputs))]

    def score(
        self,
        prompts: Sequence[str] | Sequence[TokenIds],
        continuations: Sequence[str] | Sequence[TokenIds],
        use_tqdm: bool = True,
        *,
        schedule: Schedule = "prefix",
    ) -> list[ScoreOutput]:
        """Return the log-probabilities of continuations, each after its prompt.

        Prompt and continuation are encoded together and split at the prompt's length; spaces at a prompt's end belong
        to its continuation. With prefix caching, full blocks that prompts share are computed once, and the rest of a
        prompt for each continuation.

        Args:
            prompts: texts or token ids, which must not be empty.
            continuations: one for each prompt, of the same kind.
            use_tqdm, schedule: see `generate`.

        Raises:
            ValueError: a continuation has no tokens, or see `generate`.

        Example:
            >>> likely, unlikely = llm.score(["1, 2, 3, 4"] * 2, [", 5", ", 9"])
            >>> likely.logprob > unlikely.logprob
            True
        """
        from nanovllm.tasks.scoring import score_output, score_params, split_pairs  # noqa: PLC0415

        pairs = split_pairs(self.input_processor, prompts, continuations)
        # Equal parameters are checked once.
        params = {n: score_params(n) for _, n in pairs}
        tokens, each = [token_ids for token_ids, _ in pairs], [params[n] for _, n in pairs]
        outputs = self.generate(tokens, each, use_tqdm, schedule=schedule)
        return [score_output(output, n) for output, (_, n) in zip(outputs, pairs, strict=True)]

    def embed(
        self, prompts: Prompts, pooling: Pooling | None = None, use_tqdm: bool = True, *, schedule: Schedule = "prefix"
    ) -> torch.Tensor:
        """Return normalised hidden states of prompts, [num_prompts, hidden_size] float32 on the CPU.

        Prompts are used unchanged: prefixes in a model's config_sentence_transformers.json are not added.

        Args:
            prompts, use_tqdm, schedule: see `generate`.
            pooling: "last" takes the last token's state, "mean" the mean of all; None is `default_pooling`.

        Raises:
            ValueError: an unknown pooling, see `default_pooling`, or see `generate`.

        Example:
            >>> first, second = llm.embed(["Monday", "Tuesday"])
            >>> similarity = float(first @ second)
        """
        from nanovllm.tasks.ranking import embeddings  # noqa: PLC0415

        pooling = self.default_pooling if pooling is None else pooling
        params = pooling_params(pooling)
        job = Job(self.input_processor, prompts, params, schedule=schedule, pooling=pooling)
        return embeddings(self._run(job, use_tqdm), self.model_config.hidden_size)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        by: RankBy | None = None,
        instruction: str | None = None,
        pooling: Pooling | None = None,
        use_tqdm: bool = True,
    ) -> list[RankedDocument]:
        """Return documents by their relevance to a query, the most relevant first.

        Args:
            query, documents: texts.
            top_n: number of documents to return; all if None.
            by: "embedding" scores by the cosine of embeddings, "judgement" by the probability that the model answers
                "yes" to Qwen3-Reranker's prompt; None is "judgement" for models with "reranker" in their names, else
                "embedding".
            instruction: task description for "judgement"; None: find passages that answer a web search.
            pooling, use_tqdm: see `embed`.

        Raises:
            ValueError: an argument is not text, `by` is unknown, or see `generate`.

        Example:
            >>> best = llm.rank("Monday", ["2, 3, 5, 7", "Tuesday"])[0]
            >>> best.index, best.document
            (1, 'Tuesday')
        """
        from nanovllm.tasks.ranking import Judge, cosines, rank_method, ranked, text_pairs  # noqa: PLC0415

        pairs = text_pairs([query], list(documents))
        if rank_method(by, self.config.model) == "embedding":
            scores = cosines(self.embed([query, *documents], pooling, use_tqdm), 1)
        else:
            judge = Judge(self.input_processor)
            scores = judge.scores(self.generate(judge.prompts(pairs, instruction), judge.params, use_tqdm))
        return ranked(scores, documents, top_n)

    def beam_search(self, prompts: Prompts, params: BeamSearchParams, use_tqdm: bool = False) -> list[BeamSearchOutput]:
        """Search for the most likely outputs of prompts; equals transformers' beam search.

        Args:
            prompts, use_tqdm: see `generate`.
            params: parameters of the search.

        Example:
            >>> (output,) = llm.beam_search("1, 2, 3", BeamSearchParams(beam_width=3, max_tokens=4))
            >>> len(output.sequences)
            3
        """
        from nanovllm.tasks.beam_search import BeamSearch, beam_search_output  # noqa: PLC0415

        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, not {params!r:.80}")
        given = list(as_prompts(prompts))
        self.require_ready()
        limits, greedy = self.limits, SamplingParams(temperature=0, max_tokens=params.max_tokens)
        requests = self.input_processor.process(given, [greedy] * len(given), [0] * len(given))
        searches = [
            BeamSearch(r.token_ids.tolist(), params, self.eos_token_ids, limits.max_tokens(len(r.token_ids), r.params))
            for r in requests
        ]
        self._run_searches(searches, use_tqdm)
        return [beam_search_output(search, self.tokenizer) for search in searches]

    def _run_searches(self, searches: list[BeamSearch], use_tqdm: bool) -> None:
        """Run searches to their ends; each batch has the beams of all searches, which its outputs extend."""
        states: list[RequestState] = []

        def fill(pending: News) -> None:
            if pending:
                return
            outputs = (state.result() for state in states)
            for search in (search for search in searches if not search.done and states):
                search.extend(outputs)
            requests = [request for search in searches if not search.done for request in search.requests()]
            states[:] = [RequestState(request, self.output_processor) for request in requests]
            self.engine_client.add_pending(states, pending)

        progress = Progress(self.engine_client.engine, None, "beam", disable=not use_tqdm)
        with closing(progress), closing(self.engine_client.run(fill)) as steps:
            for news in steps:
                progress.update(len(news))

    def plot_stats(self, file: str | os.PathLike[str]) -> None:
        """Plot batch size, cache use and tokens per second since the engine started; see `trace.plot_stats`.

        Example:
            >>> llm.plot_stats("run.png")
        """
        from nanovllm.client.trace import plot_stats  # noqa: PLC0415

        plot_stats(self.stats_history(), file)

    @contextmanager
    def trace(self, file: str | os.PathLike[str]) -> Iterator[None]:
        """Write a timeline of the `with` block, for https://ui.perfetto.dev.

        It shows the engine's steps with their batches (on the host, the launch and the wait for results; on the device,
        from the launch or the end of the previous step to the end of that wait; a CPU does the work in the launch), and
        the phases of each request: queued, prefill, decode. Times are the host's; events before the block are cut off,
        and steps whose launch failed are omitted. The format is Chrome's trace event format.

        Args:
            file: path, written at the end of the block.

        Raises:
            ValueError: another trace of this engine is active.
            OSError: the file cannot be written.

        Example:
            >>> with llm.trace("run.json"):
            ...     outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=4), use_tqdm=False)
        """
        from nanovllm.client.trace import trace_engine  # noqa: PLC0415

        with trace_engine(self.llm_engine, file):
            yield

    def __repr__(self) -> str:
        config, limits = self.config, self.limits
        return (
            f"LLM(model={config.model!r}, num_parameters={format_count(self.num_parameters)}, device={self.device}, "
            f"dtype={self.dtype}, tensor_parallel_size={config.tensor_parallel_size}, "
            f"{f'data_parallel_size={config.data_parallel_size}, ' if config.data_parallel_size > 1 else ''}"
            f"max_model_len={limits.max_model_len}, max_num_seqs={config.max_num_seqs}, "
            f"num_kv_slots>={limits.num_kv_slots})"
        )

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.exit()
