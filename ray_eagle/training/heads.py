"""From the product of a position's attention input to its queries, keys and values, and the gradients back.

The first matrix of the attention has rows for the queries, then rows for keys and values. In grouped-query attention their
products are rotated, and that is all. In latent attention (MLA) they have a low rank: they are normed, and expanded by a
matrix each.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_eagle.drafter.model import LatentAttention, RMSNorm
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.training.pointwise import Pointwise

if TYPE_CHECKING:
    from ray_eagle.training.weights import Matrix, Vector

Rotary = tuple[Tensor, Tensor]
"""cos and sin [N, E/2] of the positions."""


class GroupedHeads:
    """Grouped-query attention. The backward passes need no products (`LatentHeads` has the same methods, and does)."""

    keeps_products = False
    matrices: "tuple[Matrix, ...]" = ()
    vectors: "tuple[Vector, ...]" = ()

    def __init__(self, shape: DrafterShape, pointwise: Pointwise) -> None:
        self.heads, self.groups, self.width = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.pointwise = pointwise

    def queries(self, product_NQ: Tensor, rotary: Rotary) -> Tensor:
        """[N, A, E]"""
        turned: Tensor = self.pointwise.heads(product_NQ, *rotary, self.heads, self.width)[0]
        return turned

    def queries_backward(self, grad_NAE: Tensor, product_NQ: Tensor | None, rotary: Rotary) -> Tensor:
        """[N, Q]: the product's gradient."""
        found: Tensor = self.pointwise.heads_backward(grad_NAE, grad_NAE[:, :0], *rotary)
        return found

    def keys_values(self, product_NK: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Two [N, G, E]."""
        found: tuple[Tensor, Tensor] = self.pointwise.heads(product_NK, *rotary, self.groups, self.width)
        return found

    def keys_values_backward(self, keys: Tensor, values: Tensor, product_NK: Tensor | None, rotary: Rotary) -> Tensor:
        """[N, K]: the product's gradient, from those of keys and values."""
        found: Tensor = self.pointwise.heads_backward(keys, values, *rotary)
        return found

    def join(self, attended_NAE: Tensor) -> Tensor:
        """[N, D]: what o_proj reads."""
        return attended_NAE.flatten(1)

    def split(self, grad_ND: Tensor) -> Tensor:
        """[N, A, E]: its gradient, by heads."""
        return grad_ND.unflatten(1, (self.heads, self.width))


class LatentHeads:
    """Latent attention, expanded: a key for every head, and values narrower than the keys."""

    keeps_products = True

    def __init__(
        self,
        attention: LatentAttention,
        matrix: "Callable[[nn.Linear], Matrix]",
        vector: "Callable[[nn.Parameter], Vector]",
        pointwise: Pointwise,
        *,
        equal_widths: bool,
    ) -> None:
        """`equal_widths`: values end with zeros, as wide as keys, since flash attention knows one width."""
        sizes, self.heads, self.pointwise = attention.sizes, attention.heads, pointwise
        self.kept, self.width, self.rank = sizes.qk_nope_head_dim, sizes.v_head_dim, sizes.kv_lora_rank
        self.zeros = sizes.qk_head_dim - sizes.v_head_dim if equal_widths else 0

        def expansion(norm: RMSNorm, linear: nn.Linear) -> _Expansion:
            return _Expansion(vector(norm.weight), norm.eps, matrix(linear), pointwise)

        ranked = sizes.q_lora_rank is not None
        self._queries = expansion(attention.q_a_layernorm, attention.q_b_proj) if ranked else None
        self._keys_values = expansion(attention.kv_a_layernorm, attention.kv_b_proj)
        expansions = [each for each in (self._queries, self._keys_values) if each]
        self.matrices = tuple(each.matrix for each in expansions)
        self.vectors = tuple(each.norm for each in expansions)

    def queries(self, product_NQ: Tensor, rotary: Rotary) -> Tensor:
        expanded_ND = self._queries.forward(product_NQ) if self._queries else product_NQ
        found: Tensor = self.pointwise.latent_queries(expanded_ND, *rotary, self.kept)
        return found

    def queries_backward(self, grad_NAE: Tensor, product_NQ: Tensor | None, rotary: Rotary) -> Tensor:
        assert product_NQ is not None
        grad_ND: Tensor = self.pointwise.latent_queries_backward(grad_NAE, *rotary, self.kept)
        return self._queries.backward(grad_ND, product_NQ) if self._queries else grad_ND

    def keys_values(self, product_NK: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        latent_NR, shared_NR = product_NK[:, : self.rank], product_NK[:, self.rank :]
        expanded_ND = self._keys_values.forward(latent_NR)
        keys, values = self.pointwise.latent_keys_values(expanded_ND, shared_NR, *rotary, self.kept, self.width)
        return keys, F.pad(values, (0, self.zeros)) if self.zeros else values

    def keys_values_backward(self, keys: Tensor, values: Tensor, product_NK: Tensor | None, rotary: Rotary) -> Tensor:
        assert product_NK is not None
        values = values[..., : self.width]
        grad_ND, shared_NR = self.pointwise.latent_keys_values_backward(keys, values, *rotary, self.kept)
        return torch.cat([self._keys_values.backward(grad_ND, product_NK[:, : self.rank]), shared_NR], dim=1)

    def join(self, attended_NAE: Tensor) -> Tensor:
        return attended_NAE[..., : self.width].flatten(1)

    def split(self, grad_ND: Tensor) -> Tensor:
        return F.pad(grad_ND.unflatten(1, (self.heads, self.width)), (0, self.zeros))


class _Expansion:
    """A norm, and the matrix behind it."""

    def __init__(self, norm: "Vector", eps: float, matrix: "Matrix", pointwise: Pointwise) -> None:
        self.norm, self.eps, self.matrix, self.pointwise = norm, eps, matrix, pointwise

    def forward(self, x_NR: Tensor) -> Tensor:
        return self.matrix.product(self.pointwise.norm(x_NR, self.norm.value, self.eps))

    def backward(self, grad_ND: Tensor, x_NR: Tensor) -> Tensor:
        normed_NR = self.pointwise.norm(x_NR, self.norm.value, self.eps)
        grad_NR = self.matrix.backward(grad_ND, normed_NR)
        grad_NR, grad_R = self.pointwise.norm_backward(grad_NR, x_NR, self.norm.value, self.eps)
        self.norm.add(grad_R)
        return grad_NR
