"""A key/value cache whose appends copy only what is new, and whose rows can be given to other sequences.

transformers' dynamic cache concatenates: every decode step copies all keys and values of every layer. Here they stand in
buffers that double when they are full. All rows end at the same column: a shorter sequence begins further right.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

SMALLEST = 64


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, [B, G, T, E] views of buffers with room for more tokens."""

    keys: Tensor
    values: Tensor
    _buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            room = max(SMALLEST, 2 * end)
            old = (self.keys, self.values) if length else (key_states[..., :0, :], value_states[..., :0, :])
            self._buffers = (_grown(old[0], 0, room), _grown(old[1], 0, room))
        keys, values = self._buffers
        keys[..., length:end, :] = key_states
        values[..., length:end, :] = value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def move(self, columns: int) -> None:
        """Insert so many empty columns in front, or (negative) drop the first ones."""
        length = self.get_seq_length() + columns
        kept = [x[..., max(0, -columns) :, :] for x in (self.keys, self.values)]
        self._hold([_grown(x, max(0, columns), max(SMALLEST, 2 * length)) for x in kept], length)

    def keep(self, rows: Tensor) -> None:
        """Forget all other rows."""
        length = self.get_seq_length()
        self._hold([_grown(x[rows], 0, max(SMALLEST, 2 * length)) for x in (self.keys, self.values)], length)

    def take_in(self, other: "GrowingLayer", rows: Tensor) -> None:
        """The other's sequences into these rows, at the right end; rows beyond the last are new. It must not be longer."""
        assert self._buffers is not None
        length, more = self.get_seq_length(), other.get_seq_length()
        held = []
        for buffer, new in zip(self._buffers, (other.keys, other.values), strict=True):
            missing = int(rows.max()) + 1 - len(buffer)
            if missing > 0:
                buffer = torch.cat([buffer, buffer.new_zeros(missing, *buffer.shape[1:])])
            buffer[rows, :, length - more : length] = new
            held.append(buffer)
        self._hold(held, length)

    def _hold(self, buffers: list[Tensor], length: int) -> None:
        self._buffers = (buffers[0], buffers[1])
        self.keys, self.values = (x[..., :length, :] for x in buffers)


def growing_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this config; layers of another kind (sliding windows) stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_argument(model: Any) -> str:
    """What its forward pass calls a cache: transformers is renaming the argument, one model after another."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _grown(x: Tensor, front: int, room: int) -> Tensor:
    """[B, G, room, E]: zeros, x after `front` of them."""
    grown = x.new_zeros(*x.shape[:-2], room, x.shape[-1])
    grown[..., front : front + x.shape[-2], :] = x
    return grown
