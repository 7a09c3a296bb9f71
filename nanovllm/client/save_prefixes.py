"""Computes prompts, and has the engine's source of blocks keep their caches."""

from __future__ import annotations

from tqdm.auto import tqdm

from nanovllm.client.engine_client import EngineClient
from nanovllm.client.jobs import stream
from nanovllm.client.request_state import RequestState
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prefix_files import PrefixFiles
from nanovllm.engine.request import Request


def save_prefixes(
    client: EngineClient, engine: LLMEngine, files: PrefixFiles, requests: list[Request], use_tqdm: bool
) -> int:
    """Write the full blocks of requests' prompts to files; see `LLM.save_prefix_cache`.

    Args:
        client: of the engine.
        engine: computes what neither its cache nor the files have.
        files: of the engine's model.
        requests: one token each.
        use_tqdm: show a progress bar.

    Raises:
        RuntimeError: the engine got other weights meanwhile.
    """
    saved: set[bytes] = set()
    with engine.block_source(files):
        # One after the other, since a cache need not have room for two.
        for request in tqdm(requests, desc="Saving", unit="prompt", disable=not use_tqdm):
            for _ in stream(client, [RequestState(request, client.processor)]):
                pass
            if not engine.has_own_weights:
                raise RuntimeError("the model got other weights than its folder, which files of prefixes belong to")
            block_ids = engine.block_manager.prefix_blocks(request.token_ids, request.cache_salt)
            digests = files.digests(request.token_ids, request.cache_salt, len(block_ids))
            files.write(digests, block_ids)
            saved.update(digests)
    return len(saved)
