"""What commands do before they answer: check the flags, then choose how answers are sampled."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from nanovllm.config import Config
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.flags import flag_values


def check_flags(options: argparse.Namespace) -> tuple[Config, dict[str, Any]]:
    """Return the engine's settings, and the sampling parameters that flags set.

    Raises:
        ValueError: a value is out of range.
    """
    values = flag_values(options, SamplingParams)
    SamplingParams(**values)
    return Config(**flag_values(options, Config)), values


def check_single_output(values: Mapping[str, Any]) -> None:
    """Raise if flags ask for several outputs, where one is printed as it comes."""
    if values.get("n", 1) != 1:
        raise ValueError("one answer is printed: n must be 1")


def sampling_params(llm: LLM, values: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of flags; where they do not say, those that the model recommends.

    Raises:
        ValueError: a value is out of range.
    """
    params = SamplingParams(**{"max_tokens": None, **llm.recommended_values(), **values})
    return llm.limits.check_params(params)
