"""What packed weights stand for. On a GPU a weight is read and written once, by a kernel that `torch.compile` makes of the few
lines below; elsewhere, and where nothing can be compiled, step by step. Both give the same bits.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ray_eagle.compiling import compile_rows

logger = logging.getLogger(__name__)
COMPILED = ("cuda",)
"""Devices for which unpacking is compiled."""


def unpack_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """compressed-tensors' `pack-quantized`: eight values of 4 bits an int32 along the columns, lowest first, each plus 8.

    `packed` [..., O, C/8] int32, `scale` [..., O, groups]; returns [..., O, C] in the scale's dtype.
    """
    found = ONE_PASS_INT4(packed, scale) if packed.device.type in COMPILED else None
    return plain_int4(packed, scale) if found is None else found


def unpack_scaled(weight: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """One number a weight (float8 or int8) times its scale in float32, rounded to bfloat16.

    `weight` [..., O, C]; `scale` [..., O, 1], or one a `block` of rows and columns, of which the last ones may be cut.
    """
    rows, columns = weight.shape[-2:]
    if block:
        scale = scale.repeat_interleave(block[0], -2)[..., :rows, :]
    whole = not block or columns % block[1] == 0
    found = ONE_PASS_SCALED(weight, scale) if whole and weight.device.type in COMPILED else None
    if found is not None:
        return found
    if block:
        scale = scale.repeat_interleave(block[1], -1)[..., :columns]
    return scaled(weight, scale)


def plain_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """`unpack_int4` step by step, in bytes as long as it can be."""
    two_a_byte = packed.contiguous().view(torch.uint8)
    values = torch.stack((two_a_byte & 15, two_a_byte >> 4), dim=-1).flatten(-2)
    groups = values.to(scale.dtype).sub_(8).unflatten(-1, (scale.shape[-1], -1))
    return groups.mul_(scale[..., None]).flatten(-2)


def int4(packed_NW: Tensor, scale_N1: Tensor) -> Tensor:
    """N groups, each of W int32 with one scale: [N, 8W]."""
    places = torch.arange(0, 32, 4, dtype=torch.int32, device=packed_NW.device)
    values = (packed_NW[..., None] >> places) & 15
    return (values.to(scale_N1.dtype) - 8).flatten(1) * scale_N1


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """Of one shape, or [N, C] and [N, 1]."""
    return (weight.float() * scale.float()).bfloat16()


class OnePass:
    """A function of groups [N, P] and their scales [N, 1], compiled for any N when it is first called.

    Groups are as wide as the format says, or as a row: a model has few such widths.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], backend: str = "inductor") -> None:
        self._function, self._backend = function, backend
        self._compiled: Callable[[Tensor, Tensor], Tensor] | None = None
        self.fails = False

    def __call__(self, packed: Tensor, scale: Tensor) -> Tensor | None:
        """[..., O, C] of packed [..., O, P] and scales [..., O, groups]; None where it cannot be compiled."""
        if self.fails or packed.shape[-1] % scale.shape[-1]:
            return None
        try:
            self._compiled = self._compiled or compile_rows(self._function, self._backend)
            found = self._compiled(packed.contiguous().view(scale.numel(), -1), scale.contiguous().view(-1, 1))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                raise
            self.fails = True
            reason = " ".join(str(error).strip().splitlines()[:2])  # which compiler raised, and what
            logger.warning("weights are unpacked step by step, which is slower: torch.compile failed (%s)", reason)
            return None
        return found.view(*packed.shape[:-1], -1)


ONE_PASS_INT4, ONE_PASS_SCALED = OnePass(int4), OnePass(scaled)
