"""Validates and encodes user input into the `Request`s of an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, Union, get_args

# `typing` has both since Python 3.11.
from typing_extensions import NotRequired, TypedDict

from nanovllm.config import Pooling
from nanovllm.engine.request import Grammar, PromptTooLongError, Request, RequestLimits, RequestSeeds
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import Message, render_text
from nanovllm.text.constraints import ConstraintFactory, encode_bad_words
from nanovllm.utils.checks import check_int, token_list

T = TypeVar("T")

Work = Literal["short", "long", "grammar", "slow grammar"]
"""Kinds of input processing that do not wait for one another."""
LONG_TEXT = 2**16
"""Number of characters or tokens that takes about 0.1 s to process, too long for other requests to wait."""

_NO_HEAD = "the model's folder has no LM head (lm_head.weight): it makes embeddings alone, by embed and rank"


class _TokenArray(Protocol):
    """Token ids as an array or a tensor, which are not a `Sequence`."""

    @property
    def ndim(self) -> int:
        """Number of dimensions: 2 for several prompts of equal length."""

    def tolist(self) -> Any:
        """Return the ids as lists."""


TokenIds = Union[Sequence[int], _TokenArray]  # noqa: UP007 (Python 3.10 evaluates it)


class TextPrompt(TypedDict):
    """A prompt as text. It shares prefix cache blocks only with prompts of the same `cache_salt`.

    Example:
        >>> outputs = llm.generate(TextPrompt(prompt="Hello", cache_salt="of one user"))
    """

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; its optional text is only for display.

    Example:
        >>> outputs = llm.generate([TokensPrompt(prompt_token_ids=[5, 6]), TokensPrompt(prompt_token_ids=[7])])
    """

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = Union[str, TextPrompt, TokensPrompt]  # noqa: UP007
"""A single prompt, other than a sequence of token ids."""

# Any other iterable of prompts, such as a generator, is accepted too.
Prompts = Union[Prompt, Iterable[Union[Prompt, TokenIds]], Iterable[Any], _TokenArray]  # noqa: UP007
"""Prompts for `LLM.generate`: one, or several."""


class CheckedParams(NamedTuple):
    """A checked copy of sampling parameters, with values derived from them, shared by requests."""

    params: SamplingParams
    bad_token_ids: tuple[int, ...]
    bad_sequences: list[list[int]]
    grammar: Grammar | None


@dataclass(eq=False)
class InputProcessor:
    """Encodes prompts, texts only with a tokenizer, and validates requests, which `seeds` numbers as they arrive."""

    tokenizer: Any
    limits: RequestLimits
    constraints: ConstraintFactory
    seeds: RequestSeeds
    has_head: bool = True

    @cached_property
    def max_characters(self) -> int:
        """Maximum characters of a text that could fit the model, if all of its tokens were the longest one.

        Encoding takes time proportional to the length, so longer texts are refused before. 0 without a tokenizer.
        """
        return 0 if self.tokenizer is None else self.limits.max_model_len * max(map(len, self.tokenizer.get_vocab()))

    def process(
        self, prompts: list[Any], params: list[SamplingParams], priorities: list[int], **options: Any
    ) -> list[Request]:
        """Like `process_each`, but raises the first error, which names the value that is out of bounds."""
        return good_items(self.process_each(prompts, params, priorities, **options))

    def process_each(
        self, prompts: list[Any], params: list[Any], priorities: list[Any],
        *, streams: bool = False, pooling: str | None = None, template: Callable[[Any], str] | None = None,
        add_special_tokens: bool | None = None, max_prompt_tokens: int | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Request | ValueError]:  # fmt: skip
        """Return a request for each prompt, or an error if it cannot be served.

        Args:
            prompts: strings, lists of token ids, or `{"prompt": ...}` and `{"prompt_token_ids": ...}`, which may have
                a `cache_salt`; or conversations, which `template` renders.
            params, priorities: of each prompt.
            streams: whether outputs are streamed.
            pooling: asks for hidden states of prompts: "last" the last token's, "mean" the mean of all; see
                `pooling_params`.
            template: renders conversations.
            add_special_tokens: whether texts get the tokenizer's special tokens, such as BOS; None: unless a template
                made them.
            max_prompt_tokens: keep only this number of last tokens of a prompt, which then has no text; None: all.
            seeds: request numbers; None numbers the requests in this order.
        """
        if pooling is None and not self.has_head:
            return [ValueError(_NO_HEAD)] * len(prompts)
        encoded = self._encode(prompts, add_special_tokens, max_prompt_tokens, template)
        keys = [_params_key(param) for param in params]
        # Many prompts may have equal parameters, or the same error.
        checked_params = {key: self._check(param) for key, param in dict(zip(keys, params, strict=True)).items()}
        found: list[Request | ValueError] = []
        for index, (prompt, key) in enumerate(zip(encoded, keys, strict=True)):
            checked = checked_params[key]
            if isinstance(prompt.token_ids, ValueError):
                found.append(prompt.token_ids)
                continue
            if isinstance(checked, ValueError):
                found.append(checked)
                continue
            try:
                priority = check_int("priority", priorities[index])
                tokens = self.limits.check_prompt(prompt.token_ids, checked.params)
            except ValueError as error:
                found.append(error)
                continue
            seed = self.seeds.of(self.seeds.reserve(checked.params.n)) if seeds is None else seeds[index]
            request = Request(
                tokens,
                checked.params,
                prompt=prompt.text,
                priority=priority,
                cache_salt=prompt.cache_salt,
                pooling=pooling,
                bad_token_ids=checked.bad_token_ids,
                bad_sequences=checked.bad_sequences,
                grammar=checked.grammar,
                is_streamed=streams,
                seed=seed,
            )
            found.append(request)
        return found

    def _check(self, param: Any) -> CheckedParams | ValueError:
        try:
            return self._checked(self.limits.check_params(param))
        except ValueError as error:
            return error

    def _checked(self, params: SamplingParams) -> CheckedParams:
        needed = [name for name in ("stop", "bad_words") if getattr(params, name)]
        if needed and self.tokenizer is None:
            raise ValueError(f"{needed[0]}={getattr(params, needed[0])!r} needs text, but the model has no tokenizer")
        for word in params.bad_words or []:
            self._check_length("one of bad_words", word)
        tokenize = partial(self.tokenize, add_special_tokens=False, name="one of bad_words")
        bad_words = encode_bad_words(tokenize, params.bad_words or [])
        structured = params.structured_outputs
        grammar = None if structured is None else self.constraints.grammars.compile(structured)
        bad_token_ids = tuple(sequence[0] for sequence in bad_words if len(sequence) == 1)
        return CheckedParams(params, bad_token_ids, [ids for ids in bad_words if len(ids) > 1], grammar)

    def _check_length(self, name: str, text: str, kind: type[ValueError] = ValueError) -> None:
        if len(text) > self.max_characters:
            most = f"the {self.max_characters} that max_model_len={self.limits.max_model_len} tokens can have"
            raise kind(f"{name} has {len(text)} characters, over {most}")

    def encode(
        self, prompts: list[Any], add_special_tokens: bool | None = None, max_tokens: int | None = None,
        template: Callable[[Any], str] | None = None,
    ) -> list[TokensPrompt]:  # fmt: skip
        """Encode prompts, without checking the token ids; a text that is too long is a ValueError. See `process`."""
        encoded = self._encode(prompts, add_special_tokens, max_tokens, template)
        found: list[TokensPrompt] = []
        for prompt, token_ids in zip(encoded, good_items([prompt.token_ids for prompt in encoded]), strict=True):
            found.append({"prompt_token_ids": token_ids})
            if prompt.text is not None:
                found[-1]["prompt"] = prompt.text
        return found

    def render_chat(self, conversation: list[Message], options: dict[str, Any]) -> TokensPrompt:
        """Return a conversation's prompt, whose special tokens the template adds; see `render_text` for `options`."""
        return self.encode([render_text(self.tokenizer, conversation, **options)], add_special_tokens=False)[0]

    def _encode(
        self, prompts: list[Any], add_special_tokens: bool | None, max_tokens: int | None,
        template: Callable[[Any], str] | None,
    ) -> list[ParsedPrompt]:  # fmt: skip
        """Return prompts with unchecked token ids, or with an error instead of ids."""
        parts: list[ParsedPrompt] = []
        for prompt in prompts:
            try:
                part = parse_prompt(prompt) if template is None else ParsedPrompt(None, template(prompt))
                if part.token_ids is None and self.tokenizer is not None:
                    if max_tokens is not None:
                        # Characters beyond the reach of `max_prompt_tokens` need not be encoded.
                        part = part._replace(text=(part.text or "")[-self.max_characters :])
                    self._check_length("the prompt", part.text or "", PromptTooLongError)
            except ValueError as error:
                part = ParsedPrompt(error)
            parts.append(part)
        places = [i for i, part in enumerate(parts) if part.token_ids is None and part.text is not None]
        adds = template is None if add_special_tokens is None else add_special_tokens
        encoded = self._tokenize_each([parts[i].text or "" for i in places], adds)
        for i, token_ids in zip(places, encoded, strict=True):
            parts[i] = parts[i]._replace(token_ids=token_ids)
        return parts if max_tokens is None else [part.last(max_tokens) for part in parts]

    def tokenize(self, texts: list[str], add_special_tokens: bool = True, name: str = "the prompt") -> list[list[int]]:
        """Encode texts in one call, so that tokenizers use every core; raises the first error, about `name`."""
        found = self._tokenize_each(texts, add_special_tokens, name)
        if errors := [item for item in found if isinstance(item, ValueError)]:
            raise errors[0]
        return found

    def _tokenize_each(self, texts: list[str], add_special_tokens: bool, name: str = "the prompt") -> list[Any]:
        """Encode texts; return an error in the place of a text that cannot be encoded."""
        if not texts:
            return []
        if self.tokenizer is None:
            return [ValueError(f"{name} is a string, but the model has no tokenizer: pass token ids")] * len(texts)
        # Not `verbose`, which warns about long texts: these are refused, or cut.
        unwanted = dict.fromkeys(("verbose", "return_attention_mask", "return_token_type_ids"), False)
        try:
            token_ids: list[Any] = self.tokenizer(texts, add_special_tokens=add_special_tokens, **unwanted)["input_ids"]
        except (TypeError, ValueError) as error:
            if len(texts) > 1:
                # Encode one at a time to find the invalid ones.
                return [self._tokenize_each([text], add_special_tokens, name)[0] for text in texts]
            problem = f"cannot be tokenized: {error}"
            if surrogate := re.search(r"[\ud800-\udfff]", texts[0]):
                problem = f"has a lone surrogate (U+{ord(surrogate[0]):X}), which is not valid Unicode"
            return [_caused(f"{name} {problem}", error)]
        return token_ids


def good_items(found: Sequence[T | ValueError]) -> list[T]:
    """Return the items, or raise the first error, with the prompt's number unless all prompts share it."""
    good = [item for item in found if not isinstance(item, ValueError)]
    if len(good) < len(found):
        index, error = next((i, item) for i, item in enumerate(found) if isinstance(item, ValueError))
        raise error if all(item is error for item in found) else of_prompt(index, error)
    return good


def of_prompt(index: int, error: ValueError) -> ValueError:
    """Return an error that names the prompt, with the given error as its cause."""
    kind = PromptTooLongError if isinstance(error, PromptTooLongError) else ValueError
    return _caused(f"prompts[{index}]: {error}", error, kind)


def _caused(message: str, cause: Exception, kind: type[ValueError] = ValueError) -> ValueError:
    error = kind(message)
    error.__cause__ = cause
    return error


def pooling_params(pooling: Pooling) -> SamplingParams:
    """Return the parameters of requests for hidden states; a ValueError for an unknown pooling."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be 'last' or 'mean', not {pooling!r}")
    return SamplingParams(0, 1, detokenize=False)


class ParsedPrompt(NamedTuple):
    """A prompt as given: unchecked token ids, or a ValueError instead; text, or both; and the cache salt."""

    token_ids: Any
    text: str | None = None
    cache_salt: str | None = None

    def last(self, count: int) -> ParsedPrompt:
        """Return the prompt cut to its last `count` tokens, without its text if it was cut."""
        if isinstance(self.token_ids, ValueError) or len(self.token_ids) <= count:
            return self
        return self._replace(token_ids=self.token_ids[len(self.token_ids) - count :], text=None)


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Return the parts of a prompt; a dict of the wrong form is a ValueError."""
    if isinstance(prompt, str):
        return ParsedPrompt(None, prompt)
    if isinstance(prompt, list) or not isinstance(prompt, Mapping):
        return ParsedPrompt(token_list(prompt))
    ids, text, salt = (prompt.get(name) for name in ("prompt_token_ids", "prompt", "cache_salt"))
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt is a text that is not empty, not {salt!r:.80}")
    if set(prompt) <= {"prompt", "prompt_token_ids", "cache_salt"} and isinstance(text, (str, type(None))):
        if ids is None and text is not None:
            return ParsedPrompt(None, text, salt)
        if ids is not None and not isinstance(ids, str):
            return ParsedPrompt(token_list(ids), text, salt)
    if prompt.get("multi_modal_data"):
        raise ValueError("multi_modal_data is not supported: models run on text alone")
    raise ValueError(f"a prompt as a dict is {{'prompt': text}} or {{'prompt_token_ids': ids}}, not {prompt!r:.80}")


def _params_key(params: Any) -> Hashable:
    """Return a key of sampling parameters; with a list, or of a wrong type, they are equal to themselves alone."""
    try:
        key = tuple(vars(params).values())
        hash(key)
    except TypeError:
        return id(params)
    return key


def work_of(prompts: list[Any], params: Any) -> Work:
    """Return the kind of work that processing these prompts is; parameters may be None."""
    # The input processor refuses other types.
    if getattr(params, "structured_outputs", None) is not None:
        return "grammar"
    texts = [p.get("prompt_token_ids") or p.get("prompt") if isinstance(p, dict) else p for p in prompts]
    bad_words = getattr(params, "bad_words", None)
    texts += bad_words if isinstance(bad_words, list) else []
    return work_of_size(sum(len(text) for text in texts if isinstance(text, (str, list))))


def work_of_size(size: int) -> Work:
    """Return the kind of work that encoding or decoding this number of characters or tokens is."""
    return "long" if size > LONG_TEXT else "short"
