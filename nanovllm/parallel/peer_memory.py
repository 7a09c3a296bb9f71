"""Device memory of every rank that the other ranks' GPUs map, through CUDA's inter-process handles.

Uses the CUDA driver's calls (CUDA Driver API, "cuIpc*"), because torch offers such memory only to its default process
group.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from nanovllm.utils.device import call_driver

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that the driver accepts."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * 64),)


class PeerMemory:
    """Zeroed memory of `num_bytes` on each rank's GPU, mapped by all ranks of a host, which find it by `store`.

    The GPUs can access each other's memory. `addresses` are of each rank's memory in this process, in rank order.
    RuntimeError if the driver refuses to allocate, export or map it.
    """

    def __init__(self, num_bytes: int, rank: int, size: int, device: torch.device, store: Store) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._mapped: list[ctypes.c_uint64] = []
        own, handle = ctypes.c_uint64(), _Handle()
        self._own: ctypes.c_uint64 | None = own
        # A rank can write only once it has the handle, which is published after the memory is zeroed.
        self._call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(num_bytes))
        self.clear()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), own)
        store.set(f"memory of rank {rank}", bytes(handle).hex())
        self.addresses = [own.value if peer == rank else self._map(store, peer) for peer in range(size)]

    def synchronize(self) -> None:
        """Wait for all work launched on this rank's GPU, including its writes to the other ranks' memory."""
        self._call("cuCtxSynchronize")

    def clear(self) -> None:
        """Zero this rank's memory, and wait for that; no rank may use it meanwhile."""
        self._call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(self._num_bytes))
        self.synchronize()

    def copy(self, source: int, destination: int, num_bytes: int) -> None:
        """Copy between two addresses on GPUs of this host, after all work launched on this rank's GPU; wait for it."""
        self.synchronize()
        self._call("cuMemcpy", ctypes.c_uint64(destination), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes))
        self.synchronize()

    def unmap(self) -> None:
        """Unmap the other ranks' memory, which no kernel may still use; a second call does nothing."""
        while self._mapped:
            self._call("cuIpcCloseMemHandle", self._mapped.pop())

    def free(self) -> None:
        """Free this rank's memory, already unmapped by the other ranks; a second call does nothing."""
        own, self._own = self._own, None
        if own is not None:
            self._call("cuMemFree_v2", own)

    def _map(self, store: Store, peer: int) -> int:
        handle = _Handle.from_buffer_copy(bytes.fromhex(store.get(f"memory of rank {peer}").decode()))
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._mapped.append(address)
        return address.value

    def _call(self, name: str, *args: Any) -> None:
        with torch.cuda.device(self._device):
            # A runtime call makes the device's context current in this thread, as the driver's calls need it.
            torch.cuda.mem_get_info()
            call_driver(name, *args)
