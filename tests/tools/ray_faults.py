"""Ray Data over the bundled model while actors are killed and a node is removed: nothing is lost, doubled or different.

    python -m tests.tools.ray_faults [--rows 12000] [--kills 4] [--seeds 1 2] [--remove-node]

With `--remove-node` the cluster has three nodes, of `ray.cluster_utils.Cluster`, of which one goes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from threading import Thread
from typing import Any

import ray
from ray.cluster_utils import Cluster

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.integrations.ray import ProcessorConfig, build_processor, row_seed
from tests.ray_actors import actor_times, inherited_environment, kill_computing_actor

ENGINE: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 32}
PARAMS: dict[str, Any] = {"temperature": 0.8, "max_tokens": 24}
NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20}


def answer(rows: list[dict[str, Any]], seed: int, num_kills: int, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Answer rows while `num_kills` actors are killed as they compute, or a node of the cluster is removed."""
    config = ProcessorConfig(
        str(BUNDLED_MODEL), ENGINE, PARAMS, batch_size=8, concurrency=2, seed=seed, should_continue_on_error=True
    )
    nodes = [] if cluster is None else [cluster.add_node(**NODE) for _ in range(2)]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows) // 40)
    answers, killed = list[dict[str, Any]](), list[int]()

    def kill() -> None:
        for _ in range(num_kills):
            killed.append(kill_computing_actor(2))

    if cluster is None:
        Thread(target=kill, daemon=True).start()
    for row in build_processor(config)(dataset).iter_rows():
        answers.append(row)
        if len(nodes) == 2 and len(answers) > len(rows) // 3 and len(actor_times()) == 2 and cluster is not None:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
    assert cluster is not None or len(killed) == num_kills, f"{len(killed)} of {num_kills} kills found two actors"
    assert cluster is None or len(nodes) == 1, "the node to be removed was not found with two actors at work"
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=12000)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--remove-node", action="store_true")
    options = parser.parse_args()
    os.environ.update(inherited_environment())
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False)
    if not options.remove_node:
        cluster.add_node(**NODE)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"id": i, "prompt": f"{i} + {i * 7 % 90} ="} for i in range(options.rows)]
    for seed in options.seeds:
        start = time.monotonic()
        answers = answer(rows, seed, options.kills, cluster if options.remove_node else None)
        seconds, counts = time.monotonic() - start, Counter(row["id"] for row in answers)
        with LLM(BUNDLED_MODEL, **ENGINE) as llm:
            params = [SamplingParams(**PARAMS, seed=row_seed(seed, row)) for row in rows]
            outputs = llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
        different = sum(
            list(row["generated_tokens"]) != list(outputs[row["id"]].outputs[0].token_ids) for row in answers
        )
        errors = sum(row["__inference_error__"] != "" for row in answers)
        print(
            f"seed {seed}: {len(rows)} rows, {len(rows) - len(counts)} lost, {len(answers) - len(counts)} doubled, "
            f"{different} different, {errors} errors, {seconds:.0f} s",
            flush=True,
        )
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
