"""Defines sampling parameters, which control how a request is sampled and when it ends."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from nanovllm.utils.checks import (
    check_bool,
    check_int,
    check_number,
    check_strings,
    strict_keywords,
    token_list,
)

_MAX_BEAMS = 10
_TOKEN_ID = re.compile(r"[0-9]{1,18}")
_OFF = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "logit_bias": None, "bad_words": None, "allowed_token_ids": None, "min_tokens": 0,
    "logprobs": None,
}  # fmt: skip
"""Parameters beyond the temperature that a step must process, with their neutral values."""
_LEAST = {
    "n": 1, "top_k": -1, "min_tokens": 0, "prompt_logprobs_start": 0, "max_tokens": 1, "seed": -1, "logprobs": -1,
    "prompt_logprobs": -1,
}  # fmt: skip
"""Lowest values of parameters that are integers."""
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}
_RANGES = {
    "temperature": (0, None), "top_p": (0, 1), "min_p": (0, 1), "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2), "repetition_penalty": (0, None),
}  # fmt: skip
_SWITCHES = (
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "detokenize",
)  # fmt: skip


@strict_keywords
@dataclass
class StructuredOutputsParams:
    """A constraint on outputs: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    Attributes:
        json: a JSON schema as a dict or as text, or a pydantic model class.
        regex: a regular expression for the whole output.
        choice: a list of texts; the output is one of them.
        grammar: a context-free grammar in Lark's syntax, not in GBNF.
        json_object: any JSON object.
        disable_any_whitespace: None: JSON has one space after each comma and colon, like `json.dumps`, unless the
            schema's "x-guidance" says otherwise; True: no white space; False: white space everywhere, which small
            models fill up to `max_tokens`.
        whitespace_pattern: a regular expression for the white space allowed in JSON.
        disable_additional_properties: allow only the properties that the schema names.
        after_thinking: leave the model's reasoning, such as text between <think> and </think>, unconstrained; only the
            answer after it must match. The prompt may open the reasoning; otherwise the model may, if the begin tag is
            a single token. An end tag as the value means that the output begins within the reasoning, unless the prompt
            ends with this tag.

    Raises:
        ValueError: not exactly one of the five is set, or a value has the wrong type.

    Example:
        >>> schema = {"type": "object", "properties": {"name": {"type": "string"}}}
        >>> params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    """

    json: str | dict[str, Any] | type[Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    after_thinking: bool | str = False

    def __post_init__(self) -> None:
        names = "json", "regex", "choice", "grammar", "json_object"
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(names)}, not {given or 'none'}")
        if self.choice is not None and not check_strings("choice", self.choice):
            raise ValueError("choice is empty: nothing could be generated")
        for name in ("json_object", "disable_any_whitespace"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        check_bool("disable_additional_properties", self.disable_additional_properties)
        if not (isinstance(self.after_thinking, str) and self.after_thinking):
            check_bool("after_thinking", self.after_thinking)
        if isinstance(self.json, type):
            if not hasattr(self.json, "model_json_schema"):
                raise ValueError(f"json is a schema or a pydantic model's class, not {self.json!r}")
            self.json = self.json.model_json_schema()


@strict_keywords
@dataclass
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names and meanings.

    Fields can be assigned later; they are copied and checked again when a request is queued.

    Attributes:
        temperature: divides the logits before the softmax; 0 is greedy.
        max_tokens: maximum tokens to generate, at least 1; None: up to the model's length.
        ignore_eos: continue after end-of-sequence tokens.
        seed: makes the request's random draws the same alone, in any batch, and after preemption; in 0 ... 2**64 - 1.
            None and -1 derive a seed from the engine's seed and the request's number.
        n: number of outputs, each with its own seed derived from the request's.
        top_p: keep the most likely tokens whose probabilities add up to it, in (0, 1] (nucleus sampling, Holtzman et
            al. 2020, arXiv:1904.09751). Applied after `min_p` and `top_k`.
        top_k: keep this number of the most likely tokens; 0 and -1 keep all. Applied after `min_p`.
        min_p: keep tokens that are at least this fraction as likely as the most likely one, in 0 ... 1 (Nguyen et al.
            2024, arXiv:2407.01082).
        presence_penalty: subtracted from the logits of tokens that are in the output, in -2 ... 2.
        frequency_penalty: subtracted once for each occurrence of a token in the output, in -2 ... 2.
        repetition_penalty: divides positive logits of tokens in prompt or output, and multiplies negative ones; above 0
            (CTRL, Keskar et al. 2019, arXiv:1909.05858).
        logit_bias: added to the logits of these token ids, in -100 ... 100.
        bad_words: texts whose tokens the output must not contain.
        allowed_token_ids: the only tokens that may be generated.
        min_tokens: minimum tokens before EOS, a token of `stop_token_ids` or a stop string may end the output, unless
            nothing else is allowed, as at the end of a structured output.
        stop: texts that end the output.
        include_stop_str_in_output: keep the stop string that ended the output in its text.
        stop_token_ids: tokens that end the output, like EOS.
        logprobs: return log-probabilities of the sampled token and of this number of most likely tokens at each
            position; -1 returns the whole vocabulary. At most the engine's `max_logprobs`.
        prompt_logprobs: the same for the prompt's tokens.
        prompt_logprobs_start: first position of the prompt for which they are computed; the prefix cache serves the
            tokens before it.
        hidden_states: return the hidden states of the prompt's tokens that these layers take, numbered from 0; the
            number of layers stands for the states after the last norm, as in transformers' `output_hidden_states`.
            They are computed without the prefix cache. For states of an output, give it as a part of a prompt.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: separate special tokens by spaces in the text.
        detokenize: decode the tokens to text.
        structured_outputs: a JSON schema, regular expression, choice or grammar that the output must match; see
            `StructuredOutputsParams`.

    Raises:
        ValueError: an invalid value, a contradiction, or an unknown keyword.

    Example:
        >>> params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, stop=["."], seed=1)
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    seed: int | None = None
    _: KW_ONLY
    n: int = 1
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    hidden_states: Sequence[int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check()

    def checked(self) -> SamplingParams:
        """Return a checked copy, with values of the documented types; see the class for errors."""
        # Takes a quarter of the time of `copy.copy`, for long lists of parameters.
        params = object.__new__(type(self))
        params.__dict__.update(self.__dict__)
        params._check()
        return params

    @property
    def has_extra(self) -> bool:
        """Whether a step must know more than the temperature, as of the last check."""
        return self._has_extra

    @property
    def uses_penalties(self) -> bool:
        """Whether the tokens so far affect the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @classmethod
    def from_model(cls, folder: str | os.PathLike[str]) -> SamplingParams:
        """Return the recommendations of `generation_config.json` in a model's folder; the defaults without the file."""
        return cls(**recommended_values(folder))

    def _check(self) -> None:
        own = self.__dict__
        for name, least in _LEAST.items():
            if own[name] is not None or name not in _OPTIONAL:
                own[name] = check_int(name, own[name], least, 2**64 - 1 if name == "seed" else None)
        for name, (low, high) in _RANGES.items():
            own[name] = check_number(name, own[name], low, high, above=name in {"top_p", "repetition_penalty"})
        for name in _SWITCHES:
            check_bool(name, own[name])
        self.top_k = max(0, self.top_k)
        self.seed = None if self.seed == -1 else self.seed
        self._check_lists()
        self._check_contradictions()
        # Computed once for all requests that share the parameters; not a field.
        self._has_extra = any(own[name] != value for name, value in _OFF.items())

    def _check_lists(self) -> None:
        """Check lists and dicts; an empty one becomes None, except `allowed_token_ids`."""
        self.stop = check_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop) or None
        self.bad_words = check_strings("bad_words", self.bad_words) or None
        for name, kind in (("stop_token_ids", "token"), ("allowed_token_ids", "token"), ("hidden_states", "layer")):
            ids = token_list(getattr(self, name))
            if ids is not None:
                if not isinstance(ids, (list, tuple, set, frozenset)):
                    raise ValueError(f"{name} must be a list of {kind} ids, not {ids!r:.80}")
                setattr(self, name, [check_int(f"an id of {name}", number, 0) for number in ids])
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: nothing could be generated")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias maps token ids to numbers, not {self.logit_bias!r:.80}")
            # Keys of JSON objects are strings. Python also accepts non-ASCII digits, and refuses very long numbers.
            items = (
                (int(k) if isinstance(k, str) and _TOKEN_ID.fullmatch(k) else k, v) for k, v in self.logit_bias.items()
            )
            name = "a value of logit_bias"
            bias = {check_int("a token id of logit_bias", k, 0): check_number(name, v, -100, 100) for k, v in items}
            self.logit_bias = bias or None

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} with temperature=0: greedy outputs would all be the same")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs text, but detokenize=False")
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams, not {type(self.structured_outputs).__name__}"
            )


def make_params(values: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters whose `structured_outputs` may be a dict."""
    structured = values.get("structured_outputs")
    if isinstance(structured, dict):
        values = {**values, "structured_outputs": StructuredOutputsParams(**structured)}
    return SamplingParams(**values)


def recommended_values(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the unchecked sampling parameters in `generation_config.json` of a model's folder, by name."""
    from nanovllm.utils.folder_faults import read_json  # noqa: PLC0415

    path = os.path.join(os.fspath(folder), "generation_config.json")
    config = read_json(path) if os.path.isfile(path) else {}
    names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    given = {ours: config.get(theirs) for theirs, ours in {**names, "max_new_tokens": "max_tokens"}.items()}
    values = {name: value for name, value in given.items() if value is not None}
    return {**values, "temperature": 0.0} if config.get("do_sample") is False else values


@dataclass(frozen=True)
class SamplingExtra:
    """Sampling parameters of a running sequence beyond its temperature.

    Attributes:
        params: the request's sampling parameters.
        token_ids: prompt and output so far, if there are penalties; else empty.
        num_prompt_tokens: number of tokens in the prompt.
        end_token_ids: tokens forbidden before `params.min_tokens`.
        bad_token_ids: tokens always forbidden.
        is_masked: whether the host masks its tokens.
    """

    params: SamplingParams
    token_ids: array[int]
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    is_masked: bool = False


@strict_keywords
@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`.

    Attributes:
        beam_width: number of beams, and of outputs.
        max_tokens: maximum tokens to generate.
        ignore_eos: continue after end-of-sequence tokens.
        temperature: temperature of the summed log-probabilities, unless the engine has `logprobs_mode="raw_logprobs"`.
        length_penalty: a beam's score is its log-probability divided by its number of tokens to this power.

    Raises:
        ValueError: an invalid value, or an unknown keyword.

    Example:
        >>> params = BeamSearchParams(beam_width=4, max_tokens=50, length_penalty=0.8)
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        self.beam_width = check_int("beam_width", self.beam_width, 1, _MAX_BEAMS)
        self.max_tokens = check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        self.temperature = check_number("temperature", self.temperature, 0)
        self.length_penalty = check_number("length_penalty", self.length_penalty)
