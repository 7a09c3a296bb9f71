"""The process of an engine: loads the model, and drives the engine for the front ends that connect.

It ends when its parent process asks for it or exits, and ignores Ctrl-C, which its front ends handle.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch

from nanovllm.client.engine_server import MOST_CHARACTERS, EngineServer
from nanovllm.client.loading import LocalEngine, make_local_engine
from nanovllm.client.messages import CONNECT, EngineInfo, EnginePlan, StartFailure, portable
from nanovllm.utils.device import device_name
from nanovllm.utils.parent import end_with_parent

_SWITCH_SECONDS = 0.0005
"""Longest wait for the interpreter of a thread that serves a front end; see `nanovllm.serve.app`."""
_EXIT_SECONDS = 10.0


def run_engine(descriptor: int, parent: int) -> None:
    """Run an engine's process.

    Args:
        descriptor: of the socket to the parent process.
        parent: the parent's process id.
    """
    faulthandler.enable()
    end_with_parent(parent)
    control = Connection(descriptor)
    try:
        plan: EnginePlan = control.recv()
    except EOFError:
        return
    torch.set_num_threads(max(1, torch.get_num_threads() // plan.num_replicas))
    try:
        local = make_local_engine(plan.config)
    except Exception as error:
        control.send(StartFailure(portable(error), traceback.format_exc()[-MOST_CHARACTERS:]))
        return
    info = _info(local)
    server = EngineServer(local.engine, info, local.files.constraints)
    threading.Thread(target=_obey, args=(control, server), name="nanovllm-control", daemon=True).start()
    control.send(info)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Loaded objects stay: scanning them for garbage would delay steps.
    gc.collect()
    gc.freeze()
    cause = server.run()
    if cause is not None:
        # Without clean-up, which could wait for a lost device.
        os._exit(1)
    local.engine.exit()
    # Libraries that look for leaks at exit would report frozen objects.
    gc.unfreeze()


def _info(local: LocalEngine) -> EngineInfo:
    config = local.engine.config
    name = device_name(config.device, config.tensor_parallel_size)
    dtype = str(local.dtype).removeprefix("torch.")
    return EngineInfo(local.engine.limits, config.max_num_running, str(local.device), dtype, name)


def _obey(control: Connection, server: EngineServer) -> None:
    """Connect front ends until shutdown."""
    with suppress(EOFError, OSError):
        while control.recv() == CONNECT:
            server.connect(Connection(recv_handle(control)))
    server.close()
    # A step may wait for a device forever.
    time.sleep(_EXIT_SECONDS)
    os._exit(1)
