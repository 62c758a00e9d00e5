"""What acceptance length a drafter must reach to pay: the arithmetic.

With R = time of one speculative cycle / time of one plain decode step, the speed-up is tau / R. So R is the break-even
acceptance length; it depends on hardware, batch and number of draft steps, and hardly on how good the drafter is.
"""

from ray_eagle.errors import InputError


def break_even(cycle_seconds: float, plain_step_seconds: float) -> float:
    """R. Raises InputError unless both times are positive."""
    for name, value in (("cycle", cycle_seconds), ("plain step", plain_step_seconds)):
        if not value > 0:
            raise InputError(f"break-even: expected a {name} time above 0 s, found {value}. Measure on longer answers.")
    return cycle_seconds / plain_step_seconds


def break_even_from_rates(baseline_tps: float, cycle_ms: float) -> float:
    """R from plain decoding speed in tokens/s and the cycle time in milliseconds: 82 and 30 give 2.46."""
    return break_even(cycle_ms / 1000, 1 / baseline_tps)


def speedup(acceptance_length: float, break_even_length: float) -> float:
    """tau / R: above 1 speculation is faster than plain decoding."""
    return acceptance_length / break_even_length


def can_pay(break_even_length: float, steps: int) -> bool:
    """Whether a perfect drafter, at acceptance length steps + 1, would be faster than none."""
    return break_even_length < steps + 1
