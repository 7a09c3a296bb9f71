"""The gate: from what a user asks to the checked `Request`s that an engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, get_args

from nanovllm.config import Pooling
from nanovllm.engine.request import Grammar, Request
from nanovllm.engine.request_limits import PromptTooLongError, RequestLimits
from nanovllm.outputs import TokensPrompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import Message, render_text
from nanovllm.text.structured_output import ConstraintFactory, encode_bad_words
from nanovllm.utils.checks import check_int, token_list

LONG_TEXT = 2**16
"""Characters, or tokens, whose work takes so long, about 0.1 s, that other requests must not wait for it."""


class _CheckedParams(NamedTuple):
    """What is found once of the parameters that many requests share.

    Attributes:
        params: in range, and of this call alone.
        bad_token_ids, bad_sequences: tokens, and sequences of several tokens, that are never generated.
        grammar: what outputs must match, compiled.
    """

    params: SamplingParams
    bad_token_ids: tuple[int, ...]
    bad_sequences: list[list[int]]
    grammar: Grammar | None


class InputProcessor:
    """Encodes prompts and checks requests.

    Args:
        tokenizer: a transformers tokenizer; None takes token ids alone.
        limits: what the engine can serve.
        grammars: compiles grammars.
    """

    def __init__(self, tokenizer: Any, limits: RequestLimits, grammars: ConstraintFactory) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._grammars = grammars

    @cached_property
    def max_characters(self) -> int:
        """Characters of the longest text that fits the model, all of whose tokens are the longest one.

        Encoding a text takes time in proportion to it, so longer ones are refused before. 0 without a tokenizer.
        """
        return 0 if self.tokenizer is None else self.limits.max_model_len * max(map(len, self.tokenizer.get_vocab()))

    def process(
        self, prompts: list[Any], params: list[SamplingParams], priorities: list[int], *, streams: bool = False
    ) -> list[Request]:
        """Return requests, if all of them can be served.

        Args:
            prompts: strings, lists of token ids, or `{"prompt": ...}` and `{"prompt_token_ids": ...}`, which may have
                a `cache_salt`.
            params: of each.
            priorities: of each.
            streams: whether outputs are wanted as they come.

        Raises:
            ValueError: one cannot be served; says what is out of bounds.
        """
        encoded = self._encode(prompts)
        # Most requests of a call share their parameters, which are checked and looked at once.
        known: dict[int, _CheckedParams] = {}
        requests = []
        for index, (token_ids, text) in enumerate(encoded):
            param = params[index]
            try:
                if (found := known.get(id(param))) is None:
                    found = known[id(param)] = self._check(param)
                priority = check_int("priority", priorities[index])
                tokens = self.limits.check_prompt(token_ids, found.params)
            except ValueError as error:
                concerns_all = found is None and all(other is param for other in params)
                raise _of_prompt(index, 1 if concerns_all else len(prompts), error) from error
            salt = prompts[index].get("cache_salt") if isinstance(prompts[index], Mapping) else None
            request = Request(
                tokens,
                found.params,
                prompt=text,
                prompt_token_ids=token_ids,
                priority=priority,
                cache_salt=salt,
                bad_token_ids=found.bad_token_ids,
                bad_sequences=found.bad_sequences,
                grammar=found.grammar,
                is_streamed=streams,
            )
            requests.append(request)
        return requests

    def encode(
        self, prompts: list[Any], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[TokensPrompt]:
        """Return prompts as token ids, which are not checked yet.

        Args:
            prompts: see `process`.
            add_special_tokens: whether texts get those that the tokenizer adds, such as BOS.
            max_tokens: keep so many of the last ones; a prompt that is cut has no text any more. None: all.

        Raises:
            ValueError: a text cannot be encoded, or is too long.
        """
        if max_tokens is not None:
            # What no such number of tokens can reach need not be encoded.
            most = self.max_characters
            prompts = [prompt[-most:] if isinstance(prompt, str) else prompt for prompt in prompts]
        found: list[TokensPrompt] = []
        for ids, text in self._encode(prompts, add_special_tokens):
            is_cut = max_tokens is not None and len(ids) > max_tokens
            prompt: TokensPrompt = {"prompt_token_ids": ids[len(ids) - (max_tokens or 0) :] if is_cut else ids}
            if text is not None and not is_cut:
                prompt["prompt"] = text
            found.append(prompt)
        return found

    def render_chat(
        self,
        conversation: list[Message],
        options: dict[str, Any],
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> TokensPrompt:
        """Return the prompt of a conversation; see `render_text` for `options`, and `encode`."""
        return self.encode([render_text(self.tokenizer, conversation, **options)], add_special_tokens, max_tokens)[0]

    def _encode(self, prompts: list[Any], add_special_tokens: bool = True) -> list[tuple[Any, str | None]]:
        """Return the token ids of prompts, not checked yet, and the texts of those that have one."""
        parts: list[tuple[Any, str | None]] = []
        for index, prompt in enumerate(prompts):
            try:
                parts.append(_token_ids_and_text(prompt))
                if parts[-1][0] is None and self.tokenizer is not None:
                    self._check_length("the prompt", parts[-1][1] or "", PromptTooLongError)
            except ValueError as error:
                raise _of_prompt(index, len(prompts), error) from error
        texts = {index: text for index, (ids, text) in enumerate(parts) if ids is None and text is not None}
        try:
            encoded = iter(self.tokenize(list(texts.values()), add_special_tokens))
        except ValueError:
            # One at a time shows which it is.
            for index, text in texts.items():
                try:
                    self.tokenize([text])
                except ValueError as error:
                    raise _of_prompt(index, len(prompts), error) from error
            raise
        return [(next(encoded), text) if index in texts else (ids, text) for index, (ids, text) in enumerate(parts)]

    def process_pooling(
        self, prompts: list[Any], pooling: Pooling, priority: int = 0, *, streams: bool = False
    ) -> list[Request]:
        """Return requests for the hidden states of prompts, if all of them can be served.

        Args:
            prompts: see `process`.
            pooling: "last" takes the last token's, "mean" the mean of all.
            priority: of all of them.
            streams: see `process`.

        Raises:
            ValueError: an unknown pooling, or see `process`.
        """
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling must be 'last' or 'mean', not {pooling!r}")
        params = [SamplingParams(0, 1, detokenize=False)] * len(prompts)
        requests = self.process(prompts, params, [priority] * len(prompts), streams=streams)
        return [replace(request, pooling=pooling) for request in requests]

    def process_each(
        self, prompts: list[Any], params: list[SamplingParams], priorities: list[int]
    ) -> list[Request | ValueError]:
        """Return requests, and in the places of those that cannot be served why; see `process`."""
        try:
            return [*self.process(prompts, params, priorities)]
        except ValueError:
            found: list[Request | ValueError] = []
            for prompt, param, priority in zip(prompts, params, priorities, strict=True):
                try:
                    found += self.process([prompt], [param], [priority])
                except ValueError as error:
                    found.append(error)
            return found

    def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode texts, all in one call, since tokenizers then use every core."""
        if not texts:
            return []
        if self.tokenizer is None:
            raise ValueError(f"prompt {texts[0][:40]!r} is a string, but the model has no tokenizer: pass token ids")
        try:
            # Not `verbose`, which warns of texts that are too long: they are refused, or cut.
            options = {"add_special_tokens": add_special_tokens, "verbose": False}
            token_ids: list[list[int]] = self.tokenizer(texts, **options)["input_ids"]
        except TypeError as error:
            if len(texts) > 1:
                # Encoding one at a time shows which text is at fault.
                return [self.tokenize([text], add_special_tokens)[0] for text in texts]
            raise ValueError(f"prompt {texts[0][:40]!r} cannot be tokenized: {error}") from error
        return token_ids

    def _check_length(self, name: str, text: str, kind: type[ValueError] = ValueError) -> None:
        if len(text) > self.max_characters:
            most = f"the {self.max_characters} that max_model_len={self.limits.max_model_len} tokens can have"
            raise kind(f"{name} has {len(text)} characters, over {most}")

    def _check(self, param: Any) -> _CheckedParams:
        """Return checked parameters, and what follows from them for each request."""
        params = self.limits.check_params(param)
        needed = [name for name in ("stop", "bad_words") if getattr(params, name)]
        if needed and self.tokenizer is None:
            raise ValueError(f"{needed[0]}={getattr(params, needed[0])!r} needs text, but the model has no tokenizer")
        for word in params.bad_words or []:
            self._check_length("one of bad_words", word)
        bad_words = encode_bad_words(self.tokenizer, params.bad_words or [])
        structured = params.structured_outputs
        grammar = None if structured is None else self._grammars.compile(structured)
        bad_token_ids = tuple(sequence[0] for sequence in bad_words if len(sequence) == 1)
        return _CheckedParams(params, bad_token_ids, [ids for ids in bad_words if len(ids) > 1], grammar)


def _of_prompt(index: int, count: int, error: ValueError) -> ValueError:
    """Return an error that says which of several prompts it is of."""
    kind = PromptTooLongError if isinstance(error, PromptTooLongError) else ValueError
    return error if count == 1 else kind(f"prompts[{index}]: {error}")


def _token_ids_and_text(prompt: Any) -> tuple[Any, str | None]:
    """Return a prompt's token ids, not checked yet, and its text; one of them may be None."""
    if isinstance(prompt, str):
        return None, prompt
    if not isinstance(prompt, Mapping):
        return token_list(prompt), None
    ids, text, salt = (prompt.get(name) for name in ("prompt_token_ids", "prompt", "cache_salt"))
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt is a text that is not empty, not {salt!r:.80}")
    if set(prompt) <= {"prompt", "prompt_token_ids", "cache_salt"} and isinstance(text, (str, type(None))):
        if ids is None and text is not None:
            return None, text
        if ids is not None and not isinstance(ids, str):
            return token_list(ids), text
    raise ValueError(
        "a prompt as a dict is {'prompt': text} or {'prompt_token_ids': list of token ids}, not " + f"{prompt!r:.80}"
    )


def takes_long(prompts: list[Any], params: Any) -> bool:
    """Whether the requests need a grammar, or have so much text that it takes long to encode."""
    # What is of no such type is refused by the input processor.
    if getattr(params, "structured_outputs", None) is not None:
        return True
    texts = [prompt.get("prompt") if isinstance(prompt, dict) else prompt for prompt in prompts]
    bad_words = getattr(params, "bad_words", None)
    texts += bad_words if isinstance(bad_words, list) else []
    return sum(len(text) for text in texts if isinstance(text, (str, list))) > LONG_TEXT
