"""Aux hidden states in 8 bits: e4m3 values with one power-of-two scale per 128 channels of a layer.

A state is what a drafter reads through a matrix of its own, so 3 bits of mantissa are enough; the last state stays in
bfloat16, because the stored log-sum-exp must fit it. Scales are powers of two, kept as a biased exponent in one byte: scaling
is exact, and costs less than 1 % of the bytes.
"""

import torch
from torch import Tensor

GROUP = 128
LARGEST = 448.0
"""Of e4m3."""
BIAS = 127


def groups(hidden_size: int) -> int:
    """Scales of one state of one layer; the last group is shorter where 128 does not divide the hidden size."""
    return -(-hidden_size // GROUP)


def quantise(states_TH: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H] float8_e4m3fn values and [T, G] uint8 biased exponents e + 127: states = values * 2^e, to 3 bits.

    Each group's largest value lands in (224, 448]. NaN and infinite states have no meaningful result.
    """
    grouped_TGW = _grouped(states_TH)
    _, exponents_TG = torch.frexp(grouped_TGW.abs().amax(-1).float() / LARGEST)
    exponents_TG = exponents_TG.clamp(-126, 126)
    values_TGW = grouped_TGW.float() * power_of_two(-exponents_TG)[..., None]
    values_TH = values_TGW.flatten(1)[:, : states_TH.shape[1]]
    return values_TH.to(torch.float8_e4m3fn), (exponents_TG + BIAS).to(torch.uint8)


def dequantise(values_TH: Tensor, scales_TG: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H] in `dtype`; exact in bfloat16, whose exponent has the same range."""
    scale_TG = power_of_two(scales_TG.int() - BIAS).to(dtype)
    return (_grouped(values_TH.to(dtype)) * scale_TG[..., None]).flatten(1)[:, : values_TH.shape[1]]


def power_of_two(exponents: Tensor) -> Tensor:
    """float32 2^e, exact, from its bits; e from -126 to 127."""
    return ((exponents.int() + BIAS) << 23).view(torch.float32)


def _grouped(states_TH: Tensor) -> Tensor:
    """[T, G, 128], zeros at the end."""
    hidden = states_TH.shape[1]
    padding = groups(hidden) * GROUP - hidden
    padded = torch.nn.functional.pad(states_TH, (0, padding)) if padding else states_TH
    return padded.unflatten(1, (-1, GROUP))
