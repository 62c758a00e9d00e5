"""A key/value cache whose appends copy only what is new.

transformers' dynamic cache concatenates: every decode step copies all keys and values of every layer. Here they stand in
buffers that double when they are full.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

SMALLEST = 64


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, [B, G, T, E] views of buffers with room for more tokens."""

    _key_buffer: Tensor | None = None
    _value_buffer: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        self._key_buffer = _with_room(self._key_buffer, key_states, length)
        self._value_buffer = _with_room(self._value_buffer, value_states, length)
        end = length + key_states.shape[-2]
        self._key_buffer[..., length:end, :] = key_states
        self._value_buffer[..., length:end, :] = value_states
        self.keys, self.values = self._key_buffer[..., :end, :], self._value_buffer[..., :end, :]
        return self.keys, self.values


def growing_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this config; layers of another kind (sliding windows) stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _with_room(buffer: Tensor | None, new: Tensor, length: int) -> Tensor:
    """A buffer that holds the first `length` tokens of the old one and has room for the new ones."""
    needed = length + new.shape[-2]
    if buffer is not None and buffer.shape[-2] >= needed:
        return buffer
    capacity = max(SMALLEST, 2 * needed)
    grown = new.new_empty(*new.shape[:-2], capacity, new.shape[-1])
    if buffer is not None and length:
        grown[..., :length, :] = buffer[..., :length, :]
    return grown
