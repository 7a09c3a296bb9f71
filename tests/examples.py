"""How many examples hypothesis tries."""

from __future__ import annotations

import os


def num_examples(usual: int, thorough: int) -> int:
    """As many as a test of each change takes, or as `.ci/compat` asks for."""
    return thorough if "NANOVLLM_TEST_THOROUGH" in os.environ else usual
