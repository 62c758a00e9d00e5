"""What happens between the matrix products of the drafter's layer, forward and backward, each as one function.

Everything is computed in float32 (float64 for float64 input) and returned in the input's dtype; gradients of norm weights
stay wide. The functions are pure, so that `torch.compile` makes one or two kernels of each: `compiled()` wraps them with
rows of any number, without a compilation for every pack.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ray_eagle.compiling import compile_rows
from ray_eagle.drafter.model import latent_keys_values, latent_queries, rms_norm, rotate_half
from ray_eagle.errors import WorkerError


def wide(x: Tensor) -> Tensor:
    """float32, or float64 as it is: norms, softmax and losses are never taken in 16 bits."""
    return x if x.dtype == torch.float64 else x.float()


def norm_backward(grad_NH: Tensor, x_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients [N, H] of the input (in its dtype) and [H] of the weight (wide)."""
    x, grad = wide(x_NH), wide(grad_NH)
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit = x * inverse
    scaled = grad * weight_H
    grad_x = inverse * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return grad_x.to(x_NH.dtype), (grad * unit).sum(0)


def norm_backward_add(
    grad_NH: Tensor, x_NH: Tensor, weight_H: Tensor, eps: float, more_NH: Tensor
) -> tuple[Tensor, Tensor]:
    """`norm_backward` with the gradient that reaches the input on another way added to it."""
    grad_x, grad_weight = norm_backward(grad_NH, wide(x_NH), weight_H, eps)
    return (grad_x + wide(more_NH)).to(x_NH.dtype), grad_weight


def join(embedding_NH: Tensor, hidden_NH: Tensor, first_H: Tensor, second_H: Tensor, eps: float) -> Tensor:
    """[N, 2H]: the attention's input, normed embedding first."""
    return torch.cat([rms_norm(embedding_NH, first_H, eps), rms_norm(hidden_NH, second_H, eps)], dim=-1)


def join_backward(
    grad_N2: Tensor, embedding_NH: Tensor, hidden_NH: Tensor, second_H: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [N, H] of the hidden input and [H] of both norm weights; the embedding is frozen."""
    first, second = grad_N2.chunk(2, dim=-1)
    e = wide(embedding_NH)
    grad_first = (wide(first) * e * torch.rsqrt(e.square().mean(-1, keepdim=True) + eps)).sum(0)
    grad_hidden, grad_second = norm_backward(second, hidden_NH, second_H, eps)
    return grad_hidden, grad_first, grad_second


def heads(x_ND: Tensor, cos_NE: Tensor, sin_NE: Tensor, rotated: int, width: int) -> tuple[Tensor, Tensor]:
    """Two [N, .., E] of one product: the first `rotated` heads, rotated to their positions, and the rest as they are."""
    x = x_ND.unflatten(-1, (-1, width))
    turned = rotate_half(wide(x[:, :rotated]), cos_NE, sin_NE).to(x.dtype)
    return turned, x[:, rotated:].clone()


def heads_backward(turned_NAE: Tensor, rest_NGE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
    """[N, D]: the gradient of that product."""
    turned = rotate_half(wide(turned_NAE), cos_NE, -sin_NE).to(turned_NAE.dtype)
    return torch.cat([turned, rest_NGE.to(turned.dtype)], dim=1).flatten(1)


def latent_queries_backward(grad_NAE: Tensor, cos_NE: Tensor, sin_NE: Tensor, kept: int) -> Tensor:
    """[N, D]: the gradient of the queries' product."""
    turned = _pairs(rotate_half(wide(grad_NAE[..., kept:]), cos_NE, -sin_NE)).to(grad_NAE.dtype)
    return torch.cat([grad_NAE[..., :kept], turned], dim=-1).flatten(1)


def latent_keys_values_backward(
    keys_NAE: Tensor, values_NAE: Tensor, cos_NE: Tensor, sin_NE: Tensor, kept: int
) -> tuple[Tensor, Tensor]:
    """Gradients [N, D] of the expanded product, and [N, R] of the vector that all keys of a position share."""
    shared = wide(keys_NAE[..., kept:]).sum(1, keepdim=True)
    turned = _pairs(rotate_half(shared, cos_NE, -sin_NE))[:, 0].to(keys_NAE.dtype)
    return torch.cat([keys_NAE[..., :kept], values_NAE], dim=-1).flatten(1), turned


def _pairs(x: Tensor) -> Tensor:
    """The coordinates that `rotate_pairs` had put apart, side by side again."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def gate(both_N2: Tensor) -> Tensor:
    """silu(gate) * up of [N, 2I]."""
    gate_NI, up_NI = both_N2.chunk(2, dim=-1)
    g = wide(gate_NI)
    return (g * torch.sigmoid(g) * wide(up_NI)).to(both_N2.dtype)


def gate_backward(grad_NI: Tensor, both_N2: Tensor) -> tuple[Tensor, Tensor]:
    """The gate's output again [N, I], and the gradient [N, 2I] of its input."""
    gate_NI, up_NI = both_N2.chunk(2, dim=-1)
    g, up, grad = wide(gate_NI), wide(up_NI), wide(grad_NI)
    sigmoid = torch.sigmoid(g)
    silu = g * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return (silu * up).to(both_N2.dtype), torch.cat([grad_gate, grad * silu], dim=-1).to(both_N2.dtype)


@dataclass(frozen=True)
class Pointwise:
    """The functions above, plain or compiled."""

    norm: Callable[..., Any] = rms_norm
    norm_backward: Callable[..., Any] = norm_backward
    norm_backward_add: Callable[..., Any] = norm_backward_add
    join: Callable[..., Any] = join
    join_backward: Callable[..., Any] = join_backward
    heads: Callable[..., Any] = heads
    heads_backward: Callable[..., Any] = heads_backward
    latent_queries: Callable[..., Any] = latent_queries
    latent_queries_backward: Callable[..., Any] = latent_queries_backward
    latent_keys_values: Callable[..., Any] = latent_keys_values
    latent_keys_values_backward: Callable[..., Any] = latent_keys_values_backward
    gate: Callable[..., Any] = gate
    gate_backward: Callable[..., Any] = gate_backward


PLAIN = Pointwise()


def compiled(backend: str = "inductor") -> Pointwise:
    """Compiled for any number of rows; every other size is a constant of the kernels."""
    return Pointwise(**{f.name: _compiled(getattr(PLAIN, f.name), backend) for f in fields(Pointwise)})


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    fast = compile_rows(function, backend)

    def call(*arguments: Any) -> Any:
        try:
            return fast(*arguments)
        except RuntimeError as error:
            if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                raise
            raise WorkerError(
                f"train: torch.compile failed on {function.__name__!r}: {str(error).strip().splitlines()[0]}. It needs a "
                "C compiler on every training node; or set train.compile to false."
            ) from error

    return call
