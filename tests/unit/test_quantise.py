"""8-bit aux states against a loop over groups in float64, and what they cost."""

import math

import pytest
import torch

from ray_eagle.hidden_states.quantise import BIAS, GROUP, dequantise, groups, quantise
from ray_eagle.hidden_states.schema import sample_bytes


def slow_quantise(state: list[float]) -> tuple[list[float], list[int]]:
    """One state, group by group: the least power of two that brings the largest value below 448."""
    values, scales = [], []
    for start in range(0, len(state), GROUP):
        group = state[start : start + GROUP]
        exponent = -126 if any(group) else 0
        while max(map(abs, group)) / 2.0**exponent >= 448 and exponent < 126:
            exponent += 1
        scales.append(exponent + BIAS)
        values += [x / 2.0**exponent for x in group]
    return values, scales


@pytest.mark.parametrize("hidden", [128, 576, 40, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised_states_equal_a_loop_over_groups(hidden: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(hidden)
    magnitudes = torch.exp(8 * torch.randn(12, 1, generator=generator))
    states = (torch.randn(12, hidden, generator=generator) * magnitudes).to(dtype)
    states[3] = 0
    states[4, :5] = torch.tensor([448.0, 0.0, -448.0, 1.0, 2**-9])  # the largest value at the limit itself
    values, scales = quantise(states)
    assert values.shape == states.shape and scales.shape == (12, groups(hidden)) and scales.dtype == torch.uint8
    for row in range(12):
        expected, exponents = slow_quantise(states[row].tolist())
        assert scales[row].tolist() == exponents
        assert torch.equal(values[row].float(), torch.tensor(expected).to(torch.float8_e4m3fn).float())


def test_states_come_back_to_three_bits_of_mantissa_and_exactly_where_they_can() -> None:
    generator = torch.Generator().manual_seed(1)
    states = (torch.randn(200, 576, generator=generator) * 30).bfloat16()
    values, scales = quantise(states)
    back = dequantise(values, scales, torch.bfloat16)
    # half a step of 3 mantissa bits, and half the smallest step of e4m3 (2^-9) at each group's scale
    padded = torch.nn.functional.pad(states.float(), (0, groups(576) * GROUP - 576)).unflatten(1, (-1, GROUP))
    step = torch.exp2(scales.float() - BIAS)[..., None] * 2.0**-10
    error = torch.nn.functional.pad(back.float() - states.float(), (0, groups(576) * GROUP - 576)).abs()
    assert (error.unflatten(1, (-1, GROUP)) <= torch.maximum(padded.abs() / 16, step)).all()
    assert torch.equal(dequantise(values, scales, torch.float32), back.float())
    again, same = quantise(back)
    assert torch.equal(dequantise(again, same, torch.bfloat16), back)


@pytest.mark.parametrize(("hidden", "supervised"), [(4096, 1.0), (7168, 1.0), (576, 0.7), (4096, 0.7)])
def test_it_takes_at_most_63_percent_of_the_bytes(hidden: int, supervised: float) -> None:
    tokens = 1000
    half, quarter = (sample_bytes(tokens, round(tokens * supervised), hidden, d) for d in ("bfloat16", "float8"))
    assert quarter / half <= 0.63
    assert math.isclose(half, tokens * (6 * hidden + 5) + tokens * supervised * (2 * hidden + 8))
