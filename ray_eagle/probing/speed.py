"""Speed of speculative against plain decoding, from the times of the same prompts decoded both ways."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from ray_eagle.errors import InputError
from ray_eagle.probing.acceptance import bootstrap
from ray_eagle.probing.breakeven import break_even


@dataclass(frozen=True)
class Timing:
    """One prompt decoded both ways: median time of a cycle or step, times their number. Prefill and its token are left out."""

    cycle_seconds: float
    """All speculative cycles together."""
    cycles: int
    speculative_tokens: int
    plain_seconds: float
    plain_tokens: int


class Speed(BaseModel):
    """Pooled over the prompts; the counts that each figure rests on stand beside it."""

    model_config = ConfigDict(frozen=True)

    prompts: int
    """Prompts decoded both ways."""
    plain_step_seconds: float
    plain_seconds: float
    plain_tokens: int
    cycle_seconds: float
    """One cycle: draft, verify, and take in the accepted window."""
    speculative_seconds: float
    cycles: int
    speculative_tokens: int
    break_even: float
    """R = cycle_seconds / plain_step_seconds: the acceptance length from which on speculation is faster."""
    break_even_interval: tuple[float, float]
    """Bootstrap over prompts; a single point for one prompt."""
    plain_tokens_per_second: float
    speculative_tokens_per_second: float


def speedup_interval(
    made: np.ndarray,
    passes: np.ndarray,
    timings: Sequence[Timing | None],
    *,
    confidence: float,
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    """Interval of tau / R, resampling prompts: tau from all of them, R from those decoded both ways.

    `made` and `passes`: tokens and verify passes of each prompt, as in the acceptance length; `timings` likewise, None
    where a prompt was decoded only once.
    """
    times = [[t.cycle_seconds, t.cycles, t.plain_seconds, t.plain_tokens] if t else [0.0] * 4 for t in timings]
    rows = np.column_stack([made, passes, np.array(times, dtype=np.float64)])
    return bootstrap(
        rows,
        lambda s: (s[:, 0] / s[:, 1]) / ((s[:, 2] / s[:, 3]) / (s[:, 4] / s[:, 5])),
        confidence,
        resamples,
        seed,
    )


def pool(timings: Sequence[Timing], *, confidence: float, resamples: int, seed: int) -> Speed:
    """Pooled speed. Raises InputError when nothing was decoded after the prefill."""
    rows = np.array([[t.cycle_seconds, t.cycles, t.plain_seconds, t.plain_tokens] for t in timings], dtype=np.float64)
    cycles, plain_tokens = sum(t.cycles for t in timings), sum(t.plain_tokens for t in timings)
    if not cycles or not plain_tokens:
        raise InputError(
            f"speed: expected cycles and plain steps to time, found {cycles} and {plain_tokens} in {len(timings)} "
            "prompts that were timed both ways. Every answer ended with its first token, or before others of its batch began: "
            "use other prompts, raise max_new_tokens, or lower the concurrency."
        )
    speculative_seconds, plain_seconds = float(rows[:, 0].sum()), float(rows[:, 2].sum())
    interval = bootstrap(rows, lambda s: (s[:, 0] / s[:, 1]) / (s[:, 2] / s[:, 3]), confidence, resamples, seed)
    speculative_tokens = sum(t.speculative_tokens for t in timings)
    return Speed(
        prompts=len(timings),
        plain_step_seconds=plain_seconds / plain_tokens,
        plain_seconds=plain_seconds,
        plain_tokens=plain_tokens,
        cycle_seconds=speculative_seconds / cycles,
        speculative_seconds=speculative_seconds,
        cycles=cycles,
        speculative_tokens=speculative_tokens,
        break_even=break_even(speculative_seconds / cycles, plain_seconds / plain_tokens),
        break_even_interval=interval,
        plain_tokens_per_second=plain_tokens / plain_seconds,
        speculative_tokens_per_second=speculative_tokens / speculative_seconds,
    )
