"""Bring captured tensors to the host while the device goes on computing, in a bounded amount of memory.

A slot is one page-locked buffer. `fetch` takes a free slot, waiting when the writers are slower than the device (that is the
back-pressure), and queues the copies on a stream of their own. Whoever uses the tensors waits for the copies alone.
"""

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

SLOTS = 4
"""Packs between the device and the disk."""
ALIGN = 64


class Fetched:
    """Tensors on their way to the host; a context manager that waits for them, and frees their slot at the end."""

    def __init__(self, tensors: dict[str, Tensor], arrived: Any, slot: "_Slot", free: "SimpleQueue[_Slot]") -> None:
        self._tensors, self._arrived, self._slot, self._free = tensors, arrived, slot, free

    def __enter__(self) -> dict[str, Tensor]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors

    def __exit__(self, *_: object) -> None:
        self._free.put(self._slot)


class Staging:
    """Slots shared by all threads of an actor."""

    def __init__(self, device: torch.device, slots: int = SLOTS) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        self._queueing = threading.Lock()
        for _ in range(slots):
            self._free.put(_Slot())

    def fetch(self, tensors: Mapping[str, Tensor]) -> Fetched:
        """Start copying; the result must be entered, or its slot is lost. On a CPU the tensors are used as they are."""
        slot = self._free.get()
        if self._stream is None:
            return Fetched({name: t.contiguous() for name, t in tensors.items()}, None, slot, self._free)
        with self._queueing:
            places = slot.lay_out(tensors)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for name, tensor in tensors.items():
                    places[name].copy_(tensor, non_blocking=True)
                    tensor.record_stream(self._stream)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
        return Fetched(places, arrived, slot, self._free)


class _Slot:
    """One page-locked buffer, grown when a pack needs more."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A host tensor for each, of its shape and dtype."""
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += -(-tensor.nbytes // ALIGN) * ALIGN
        if len(self._memory) < end:
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        return {
            name: self._memory[starts[name] : starts[name] + t.nbytes].view(t.dtype).view(t.shape)
            for name, t in tensors.items()
        }
