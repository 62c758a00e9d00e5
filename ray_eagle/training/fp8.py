"""Matrix products in 8 bits (Hopper and later): e4m3 forward, e5m2 for gradients, one dynamic scale a tensor.

Elsewhere the same numbers are computed from the quantised values in wider arithmetic, so that tests need no GPU. Sizes must
be multiples of 16: rows of activations are padded with zeros, which add nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_eagle.training.pointwise import compile_rows

FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2
MULTIPLE = 16


@dataclass(frozen=True)
class Quantised:
    """A matrix [M, N] in 8 bits: `values` * `scale`. M is a multiple of 16 after padding; `count` rows are real."""

    values: Tensor
    scale: Tensor
    """[] float32."""
    count: int

    def transposed(self) -> "Quantised":
        """[N, M], its rows contiguous as the hardware wants them; padded columns stay."""
        bits = self.values.view(torch.uint8)
        turned = _fast_transpose()(bits) if bits.is_cuda else _transpose(bits)
        return Quantised(turned.view(self.values.dtype), self.scale, self.values.shape[1])

    def rows(self, rows: slice) -> "Quantised":
        start, stop, _ = rows.indices(self.count)
        return Quantised(self.values[start:stop], self.scale, stop - start)

    def columns(self, columns: slice) -> "Quantised":
        return Quantised(self.values[:, columns], self.scale, self.count)


def quantise(x_MN: Tensor, kind: torch.dtype) -> Quantised:
    """The largest magnitude becomes the largest number of `kind`. Never waits for the GPU."""
    fast = x_MN.is_cuda and len(x_MN) > 1
    scale, values = _fast()(x_MN, kind) if fast else _quantise(x_MN, kind)
    padding = -len(values) % MULTIPLE
    if padding:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, padding)).view(kind)
    return Quantised(values, scale, len(x_MN))


def _quantise(x_MN: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    most = torch.finfo(kind).max
    largest = x_MN.abs().amax() if x_MN.numel() else x_MN.new_zeros(())
    scale = largest.float().clamp(min=1e-12) / most
    return scale, (x_MN.float() / scale).clamp(-most, most).to(kind)


@cache
def _fast() -> Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]:
    """`_quantise` as two kernels: plain torch reads and writes the numbers five times."""
    return compile_rows(_quantise)


def _transpose(bits_MN: Tensor) -> Tensor:
    return bits_MN.T.contiguous()


@cache
def _fast_transpose() -> Callable[[Tensor], Tensor]:
    """`_transpose` in tiles: plain torch reads single bytes far apart."""
    return compile_rows(_transpose)


def product(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """[M, N] in `dtype`: a [M, K] times b [N, K] transposed."""
    return _multiply(a, b, dtype)[: a.count, : b.count]


def add_product(sum_MN: Tensor, a: Quantised, b: Quantised, empty: bool = False) -> None:
    """sum += a [M, K] times b [N, K] transposed; sum = that where it is still `empty`.

    The sum is float32; the product comes in bfloat16, which rounds far less than 8 bits did and is half to write and read.
    """
    product_MN = _multiply(a, b, torch.bfloat16)
    sum_MN.copy_(product_MN) if empty else sum_MN.add_(product_MN)


def _multiply(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    if not a.values.numel():
        return a.scale.new_zeros(len(a.values), len(b.values), dtype=dtype)
    if a.values.device.type != "cuda":
        wide = torch.promote_types(dtype, torch.float32)
        scaled = [q.values.to(wide) * q.scale.to(wide) for q in (a, b)]
        return (scaled[0] @ scaled[1].T).to(dtype)
    return torch._scaled_mm(a.values, b.values.T, a.scale, b.scale, out_dtype=dtype)
