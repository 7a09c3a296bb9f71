"""A model for EleutherAI's lm-evaluation-harness; importing this module registers it as `nanovllm`.

The harness (0.4.13) finds models only in its registry, not through entry points of other packages, so its own command
`lm_eval --model nanovllm` would not find this one: `main` registers the model and runs that command.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.display import install_hint

try:
    # Register the harness's own models first: it skips them once another model is registered.
    import lm_eval.models  # noqa: F401
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"lm-evaluation-harness cannot be imported ({error}): {install_hint('eval')}") from error

_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("nanovllm")
class NanoVLLM(TemplateLM):
    """Answers the harness's requests with an `LLM`; tokenises like the harness's own `hf` model.

    Args:
        pretrained: a folder or a Hub id.
        batch_size, max_batch_size: ignored; the engine batches all requests of a task.
        add_bos_token: whether texts begin with BOS; None leaves it to the tokenizer.
        prefix_token_id: token that stands for an empty context; None: BOS, or EOS without a BOS.
        max_gen_toks: maximum tokens to generate, unless a task sets it.
        device: as in `Config`; the harness's default "cuda:0" means the CPU on a machine without a GPU, as for its own
            `hf` model.
        config: fields of `nanovllm.config.Config`.
    """

    def __init__(
        self, pretrained: str,
        *, batch_size: int | str | None = None, max_batch_size: int | None = None, add_bos_token: bool | None = None,
        prefix_token_id: int | None = None, max_gen_toks: int = 256, device: str = "auto", **config: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "auto"
        self.llm = LLM(pretrained, device=device, **config)
        self.tokenizer = self.llm.tokenizer
        if self.tokenizer is None:
            self.llm.exit()
            raise ValueError(f"pretrained={pretrained!r} has no tokenizer, and the harness asks with texts")
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Maximum input tokens: the last token of a text is scored, but never an input."""
        return self.llm.limits.max_model_len - 1

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return a text's tokens, without a second BOS if a chat template has written one."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            add_special_tokens = False
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation; without `add_generation_prompt` its last message is left open."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return log-probabilities of requests (cache key, context, continuation), and whether they are greedy."""
        contexts = [self._truncated(context, self.max_length + 1 - len(tokens)) for _, context, tokens in requests]
        scores = self.llm.score(contexts, [tokens for _, _, tokens in requests], use_tqdm=not disable_tqdm)
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            # Windows of a longer text have no cache key.
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log-probabilities of whole texts; long texts are split into windows that do not overlap."""
        texts = [request.args[0] for request in requests]
        windows = [self._windows(text) for text in texts]
        flat = [(None, *window) for parts in windows for window in parts]
        answers = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        totals = [sum(next(answers)[0] for _ in parts) for parts in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the completions of contexts, without the stop strings."""
        contexts, options = [request.args[0] for request in requests], [request.args[1] for request in requests]
        params = [self._sampling_params(given) for given in options]
        room = [self.max_length - (item.max_tokens or 0) for item in params]
        prompts = [self._truncated(self.tok_encode(c), space) for c, space in zip(contexts, room, strict=True)]
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts: list[str] = [output.outputs[0].text for output in outputs]
        for context, given, text in zip(contexts, options, texts, strict=True):
            self.cache_hook.add_partial("generate_until", (context, given), text)
        return texts

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in windows]

    def _truncated(self, token_ids: list[int], length: int) -> list[int]:
        """Return the last tokens of a context that fit beside the generated ones."""
        if length < 1:
            raise ValueError(f"a request leaves no room for a context in max_model_len={self.max_length + 1}")
        if len(token_ids) > length:
            warnings.warn(f"a context of {len(token_ids)} tokens is truncated to its last {length}", stacklevel=2)
        return token_ids[-length:]

    def _sampling_params(self, given: dict[str, Any]) -> SamplingParams:
        """Return a task's generation options as sampling parameters, greedy by default."""
        options = dict(given)
        lengths = [options.pop(name, None) for name in _MAX_TOKENS_NAMES]
        max_tokens = next((int(length) for length in lengths if length is not None), self.max_gen_toks)
        do_sample = options.pop("do_sample", None)
        temperature = float(options.pop("temperature", 1.0 if do_sample else 0.0))
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        return SamplingParams(
            0.0 if do_sample is False else temperature,
            max_tokens,
            # Texts do not contain special tokens.
            stop=[text for text in until if text and text not in special],
            stop_token_ids=[special[text] for text in until if text in special],
            **options,
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the harness's command with this model unless `--model` names another; see `lm_eval --help`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    names_model = any(item == "-M" or item.split("=")[0] == "--model" for item in arguments)
    if not names_model and arguments[:1] not in (["ls"], ["validate"]):
        arguments += ["--model", "nanovllm"]
    before, sys.argv = sys.argv, ["nanovllm eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


if __name__ == "__main__":
    main()
