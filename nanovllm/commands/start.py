"""What commands check before they load a model."""

from __future__ import annotations

import argparse
from typing import Any

from nanovllm.config import Config
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
