"""The number of examples that hypothesis tries."""

from __future__ import annotations

import os


def num_examples(usual: int, thorough: int) -> int:
    """Return `usual`, or `thorough` where `.ci/compat` asks for it."""
    return thorough if "NANOVLLM_TEST_THOROUGH" in os.environ else usual
