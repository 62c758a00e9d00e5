"""Matrix products in 8 bits (Ada, Hopper and later): e4m3 forward, e5m2 for gradients, one dynamic scale a tensor.

On CPUs the same numbers are computed from the quantised values in wider arithmetic, so that tests need no GPU. Sizes must
be multiples of 16: rows are padded with zeros, which add nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2
MULTIPLE = 16
CAPABILITY = (8, 9)
SMALLEST = 1e-12
"""The largest magnitude is taken as at least this, so that zeros have a scale."""


Quantiser = Callable[[list[Tensor], torch.dtype, bool, bool], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Quantised:
    """A matrix [M, N] in 8 bits, each of its parts padded with rows of zeros to a multiple of 16; `count` rows are real.

    They are the first ones, if all parts but the last have a multiple of 16.
    """

    values: Tensor
    """[M, N]; times `scale`. Empty [0, 0] if only the other form was asked for."""
    turned: Tensor
    """[N, M]: the same transposed, its rows contiguous as the hardware wants them; empty likewise."""
    scale: Tensor
    """[] float32."""
    count: int

    def transposed(self) -> "Quantised":
        return Quantised(self.turned, self.values, self.scale, len(self.turned))

    def rows(self, rows: slice) -> "Quantised":
        start, stop, _ = rows.indices(self.count)
        return Quantised(self.values[start:stop], self.turned[:, start:stop], self.scale, stop - start)

    def columns(self, columns: slice) -> "Quantised":
        return Quantised(self.values[:, columns], self.turned[columns], self.scale, self.count)


def quantise(parts: list[Tensor], kind: torch.dtype, *, values: bool = True, turned: bool = True) -> Quantised:
    """Matrices on top of each other, as one. The largest magnitude becomes the largest number of `kind`.

    In either form or both. Never waits for the GPU.
    """
    function: Quantiser = plain_quantise
    if parts[0].is_cuda:
        from ray_eagle.training import kernels

        function = kernels.quantise
    values_MN, turned_NM, scale = function(parts, kind, values, turned)
    return Quantised(values_MN, turned_NM, scale, sum(map(len, parts)))


def plain_quantise(parts: list[Tensor], kind: torch.dtype, values: bool, turned: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values, turned and scale in plain torch."""
    most = torch.finfo(kind).max
    x_MN = torch.cat([F.pad(part, (0, 0, 0, -len(part) % MULTIPLE)) for part in parts])
    largest = x_MN.abs().amax() if x_MN.numel() else x_MN.new_zeros(())
    scale = largest.float().clamp(min=SMALLEST) / most
    small = (x_MN.float() / scale).clamp(-most, most).to(kind)
    none = small.new_empty(0, 0)
    return small if values else none, small.T.contiguous() if turned else none, scale


def product(a: Quantised, b: Quantised, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """[M, N] in `dtype`: a [M, K] times b [N, K] transposed.

    `fast`: Hopper may sum in the fewer bits of its tensor cores, which is usual for outputs and not for gradients.
    """
    return _multiply(a, b, dtype, fast)[: a.count, : b.count]


def add_product(sum_MN: Tensor, a: Quantised, b: Quantised, empty: bool = False) -> None:
    """sum += a [M, K] times b [N, K] transposed; sum = that where it is still `empty`.

    The sum is float32. What is added to it comes in bfloat16, which rounds far less than 8 bits did and is half to write and read.
    """
    if not empty:
        sum_MN.add_(_multiply(a, b, torch.bfloat16))
    elif sum_MN.is_cuda and a.values.numel():
        _scaled_mm(a, b, sum_MN.dtype, out=sum_MN)
    else:
        sum_MN.copy_(_multiply(a, b, sum_MN.dtype))


def _multiply(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> Tensor:
    if not a.values.numel():
        return a.scale.new_zeros(len(a.values), len(b.values), dtype=dtype)
    if a.values.device.type != "cuda":
        wide = torch.promote_types(dtype, torch.float32)
        scaled = [q.values.to(wide) * q.scale.to(wide) for q in (a, b)]
        return (scaled[0] @ scaled[1].T).to(dtype)
    return _scaled_mm(a, b, dtype, use_fast_accum=fast)


def _scaled_mm(a: Quantised, b: Quantised, dtype: torch.dtype, **more: Any) -> Tensor:
    found: Tensor = torch._scaled_mm(a.values, b.values.T, a.scale, b.scale, out_dtype=dtype, **more)
    return found
