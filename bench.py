"""Run the benchmark: `python bench.py [--workload all] [--shape 8B]`, the same as `nanovllm bench`."""

from __future__ import annotations

from nanovllm.cli.bench import main, measure_ceilings

__all__ = ["main", "measure_ceilings"]

if __name__ == "__main__":
    main()
