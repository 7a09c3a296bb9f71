"""From what a user asks to the token ids and features that an engine takes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.request_limits import RequestLimits
from nanovllm.engine.sequence import RequestFeatures
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.output_processor import OutputState
from nanovllm.text.structured_output import BadWordsConstraint, GrammarCompiler, encode_bad_words


@dataclass(frozen=True)
class Request:
    """A request that an engine can serve; `features` of each of its outputs."""

    token_ids: array[int]
    params: SamplingParams
    features: list[RequestFeatures]


class InputProcessor:
    """Encodes prompts and checks requests.

    Args:
        tokenizer: a transformers tokenizer; None takes token ids alone.
        limits: what the engine can serve.
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Any, limits: RequestLimits, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._grammars = GrammarCompiler(tokenizer, limits.vocab_size, eos_token_ids)

    def process(
        self, prompts: list[Any], params: list[SamplingParams], priorities: list[int], *, streams: bool = False
    ) -> list[Request]:
        """Return requests, if all of them can be served.

        Args:
            prompts: strings, lists of token ids, or `{"prompt": ...}` and `{"prompt_token_ids": ...}`.
            params: of each.
            priorities: of each.
            streams: whether outputs are wanted as they come.

        Raises:
            ValueError: one cannot be served; says what is out of bounds.
        """
        plain = [_plain_prompt(prompt) for prompt in prompts]
        token_ids = iter(self.tokenize([prompt for prompt in plain if isinstance(prompt, str)]))
        # Most requests of a call share their parameters, which are checked and looked at once.
        checked: dict[int, tuple[SamplingParams, list[list[int]]]] = {}
        requests = []
        for prompt, param, priority in zip(plain, params, priorities, strict=True):
            if id(param) not in checked:
                checked[id(param)] = self._check(param)
            known, bad_words = checked[id(param)]
            text = prompt if isinstance(prompt, str) else None
            tokens = self.limits.check_prompt(next(token_ids) if isinstance(prompt, str) else prompt, known)
            features = [self._features(known, bad_words, priority, text, streams) for _ in range(known.n)]
            requests.append(Request(tokens, known, features))
        return requests

    def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode texts, all in one call, since tokenizers then use every core."""
        if not texts:
            return []
        if self.tokenizer is None:
            raise ValueError(f"prompt {texts[0][:40]!r} is a string, but the model has no tokenizer: pass token ids")
        try:
            token_ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
        except TypeError as error:
            if len(texts) > 1:
                # Encoding one at a time shows which text is at fault.
                return [self.tokenize([text], add_special_tokens)[0] for text in texts]
            raise ValueError(f"prompt {texts[0][:40]!r} cannot be tokenized: {error}") from error
        return token_ids

    def _check(self, param: Any) -> tuple[SamplingParams, list[list[int]]]:
        """Return checked parameters, and the token sequences of their bad words."""
        params = self.limits.check_params(param)
        needed = [name for name in ("stop", "bad_words") if getattr(params, name)]
        if needed and self.tokenizer is None:
            raise ValueError(f"{needed[0]}={getattr(params, needed[0])!r} needs text, but the model has no tokenizer")
        return params, encode_bad_words(self.tokenizer, params.bad_words or [])

    def _features(
        self, params: SamplingParams, bad_words: list[list[int]], priority: int, text: str | None, streams: bool
    ) -> RequestFeatures:
        constraint: Any = None
        if params.structured_outputs is not None:
            constraint = self._grammars.make(params.structured_outputs)
        sequences = [sequence for sequence in bad_words if len(sequence) > 1]
        if sequences:
            constraint = BadWordsConstraint(sequences, constraint)
        return RequestFeatures(
            priority=priority,
            sink=OutputState(self.tokenizer, params) if params.stop or streams else None,
            constraint=constraint,
            bad_token_ids=tuple(sequence[0] for sequence in bad_words if len(sequence) == 1),
            prompt=text,
        )


def _plain_prompt(prompt: Any) -> Any:
    """Return a prompt's text or token ids."""
    if not isinstance(prompt, Mapping):
        return prompt
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"} and not isinstance(prompt["prompt_token_ids"], str):
        return prompt["prompt_token_ids"]
    raise ValueError(
        "a prompt as a dict is {'prompt': text} or {'prompt_token_ids': list of token ids}, not " + f"{prompt!r:.80}"
    )
