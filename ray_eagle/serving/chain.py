"""Chain drafting with a key/value cache: what the drafter does between two verifications.

Position t pairs the target's aux states of token t with token t+1. Its output is needed only where a chain starts, at
the newest position; every older one is needed for its key and value alone. So the one query in flight is always the
newest and sees all that is cached: attention here needs no mask.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_eagle.drafter.model import Drafter


class Drafting(Protocol):
    """What the engine asks of a drafter. A test may plug in one that knows the answer."""

    aux_layers: tuple[int, ...]
    """Output-of-layer ids of the states that `extend` receives."""

    def reset(self) -> None:
        """Forget everything: a new sequence begins."""

    def extend(self, aux_TC: Tensor, next_tokens: Sequence[int]) -> None:
        """Add the next T positions: the target's aux states of each, and the token that follows it."""

    def draft(self, steps: int) -> list[int]:
        """`steps` target token ids that continue the sequence after the last token given to `extend`."""


class KeyValues:
    """Keys and values [G, capacity, E] of the positions so far (those of latent attention expanded, its values narrower);
    grows by doubling, shrinks by forgetting.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys = self._values = torch.empty(0)

    def append(self, keys_TGE: Tensor, values_TGE: Tensor) -> None:
        needed = self.length + len(keys_TGE)
        if self._keys.dim() != 3 or needed > self._keys.shape[1]:
            self._keys = self._grown(self._keys, keys_TGE, 2 * needed)
            self._values = self._grown(self._values, values_TGE, 2 * needed)
        self._keys[:, self.length : needed] = keys_TGE.transpose(0, 1)
        self._values[:, self.length : needed] = values_TGE.transpose(0, 1)
        self.length = needed

    def attend(self, query_AE: Tensor, scale: float) -> Tensor:
        """[A, E] -> [A, value width]: one query over everything cached, in one softmax."""
        keys, values = self._keys[None, :, : self.length], self._values[None, :, : self.length]
        query = query_AE[None, :, None]
        return F.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)[0, :, 0]

    def _grown(self, old: Tensor, like_TGE: Tensor, capacity: int) -> Tensor:
        grown = like_TGE.new_empty(like_TGE.shape[1], capacity, like_TGE.shape[2])
        if self.length:
            grown[:, : self.length] = old[:, : self.length]
        return grown


class DrafterChain:
    """`Drafting` by an EAGLE-3 drafter, batch 1, greedy."""

    def __init__(self, drafter: Drafter, embedding: nn.Embedding) -> None:
        self.aux_layers: tuple[int, ...] = drafter.shape.aux_layers
        self._drafter = drafter
        self._embedding_VH = embedding.weight
        self._target_ids = drafter.target_ids
        self._cache = KeyValues()
        self._output_H = torch.empty(0)

    def reset(self) -> None:
        self._cache = KeyValues()

    def extend(self, aux_TC: Tensor, next_tokens: Sequence[int]) -> None:
        """Step 0 at T new positions, from target states. [T, 3H] and T token ids."""
        hidden_TH = self._drafter.project(aux_TC)
        self._output_H = self._layer(hidden_TH, next_tokens, self._cache.length)

    def draft(self, steps: int) -> list[int]:
        """Step k feeds on the un-normed output of step k-1 and the token just drafted, at RoPE position t+k.

        The keys of steps 1.. are dropped at the end: the accepted window is recomputed from target states by `extend`.
        """
        committed, output_H = self._cache.length, self._output_H
        drafted = [self._best(output_H)]
        for k in range(1, steps):
            output_H = self._layer(output_H[None], drafted[-1:], committed - 1 + k)
            drafted.append(self._best(output_H))
        self._cache.length = committed
        return drafted

    def _layer(self, hidden_TH: Tensor, tokens: Sequence[int], first: int) -> Tensor:
        """Cache keys and values of positions first.. and return the output u [H] of the last one."""
        drafter, device = self._drafter, hidden_TH.device
        # the rows themselves, as in training and in engines: some targets' modules scale them (Gemma)
        embedding_TH = F.embedding(torch.tensor(tokens, device=device), self._embedding_VH)
        input_T2 = drafter.attention_input(hidden_TH, embedding_TH)
        positions_T = torch.arange(first, first + len(tokens), device=device)
        self._cache.append(*drafter.keys_values(input_T2, positions_T))
        query_1AE = drafter.queries(input_T2[-1:], positions_T[-1:])
        attended_AE = self._cache.attend(query_1AE[0], drafter.shape.softmax_scale)
        return drafter.finish(hidden_TH[-1:], attended_AE[None])[0]

    def _best(self, output_H: Tensor) -> int:
        return int(self._target_ids[self._drafter.logits(output_H).argmax()])
