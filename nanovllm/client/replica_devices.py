"""Which GPUs a replica has."""

from __future__ import annotations

from nanovllm.config import Config
from nanovllm.utils.gpu_count import num_gpus


def replica_devices(config: Config) -> list[str]:
    """Return the `device` setting of each replica.

    Replica i has the GPUs `i * tensor_parallel_size` and on, counted from the one that is named. If there are fewer,
    replicas of one GPU share those that there are, provided that `gpu_memory_utilization` leaves room for each.

    Raises:
        ValueError: there are too few GPUs.
    """
    size, num_ranks, name = config.data_parallel_size, config.tensor_parallel_size, config.device
    if size == 1 or name == "cpu":
        return [name] * size
    count = num_gpus()
    if name == "auto" and not count:
        return ["cpu"] * size
    first = int(name.partition(":")[2] or 0)
    num_free = count - first
    if size * num_ranks <= num_free:
        return [f"cuda:{first + i * num_ranks}" for i in range(size)]
    message = (
        f"data_parallel_size={size} with tensor_parallel_size={num_ranks} needs {size * num_ranks} GPUs"
        f"{f' from {name} on' if first else ''}, but there are {num_free}"
    )
    if num_ranks > 1 or num_free < 1:
        raise ValueError(message)
    num_sharing = -(-size // num_free)
    if config.gpu_memory_utilization * num_sharing > 1:
        condition = f"gpu_memory_utilization is at most {1 / num_sharing:.2g}, not {config.gpu_memory_utilization}"
        raise ValueError(f"{message}; {num_sharing} replicas share a GPU if {condition}")
    return [f"cuda:{first + i % num_free}" for i in range(size)]
