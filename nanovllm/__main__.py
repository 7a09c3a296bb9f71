"""Runs the command `nanovllm` by `python -m nanovllm`."""

from __future__ import annotations

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
