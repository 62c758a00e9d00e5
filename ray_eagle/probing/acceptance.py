"""Acceptance statistics, pooled over verify passes, with a bootstrap interval over prompts.

Input is always the number of accepted drafts of each verify pass, grouped by prompt. With h[j] passes that accepted j
drafts and N passes in all: marginal p_i = sum_{j>=i} h[j] / N, conditional c_i = p_i / p_{i-1}, acceptance length
tau = 1 + sum p_i (the bonus token counts, the prefill's token does not).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from pydantic import BaseModel, ConfigDict

from ray_eagle.errors import InputError

Accepted = Sequence[Sequence[int]]
"""For each prompt, the number of accepted drafts of each of its verify passes."""
Statistic = Callable[[np.ndarray], np.ndarray]


class CategoryAcceptance(BaseModel):
    """Acceptance over the prompts of one category."""

    model_config = ConfigDict(frozen=True)

    acceptance_length: float
    interval: tuple[float, float]
    marginal: list[float]
    verify_passes: int
    prompts: int


class Acceptance(CategoryAcceptance):
    """Acceptance over all prompts."""

    conditional: list[float | None]
    """c_i = p_i / p_{i-1}; None where no pass got that far."""
    histogram: list[int]
    """h[j], j = 0..K."""
    by_category: dict[str, CategoryAcceptance]


def acceptance(
    accepted: Accepted,
    categories: Sequence[str],
    *,
    steps: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Acceptance:
    """Pooled acceptance of prompts whose categories are given in the same order.

    `prompts` counts those with at least one pass. Raises InputError when there is no pass at all, or a count is not
    within 0..steps.
    """
    if len(accepted) != len(categories):
        raise InputError(
            f"acceptance: expected a category for each of {len(accepted)} prompts, found {len(categories)}."
        )
    groups: dict[str, list[Sequence[int]]] = {}
    for counts, category in zip(accepted, categories, strict=True):
        if counts:
            groups.setdefault(category, []).append(counts)
    pooled = partial(_pooled, steps=steps, confidence=confidence, resamples=resamples, seed=seed)
    whole = pooled(accepted)
    histogram = count_accepted(accepted, steps).sum(0)
    reached = [1.0, *whole.marginal]
    return Acceptance(
        **whole.model_dump(),
        conditional=[p / before if before else None for before, p in zip(reached, whole.marginal, strict=False)],
        histogram=histogram.tolist(),
        by_category={category: pooled(groups[category]) for category in sorted(groups)},
    )


def count_accepted(accepted: Accepted, steps: int) -> np.ndarray:
    """[prompts, K+1] int64: the histogram of each prompt. Raises InputError for a count outside 0..K."""
    table: np.ndarray = np.zeros((len(accepted), steps + 1), dtype=np.int64)
    for row, counts in zip(table, accepted, strict=True):
        values = np.asarray(counts, dtype=np.int64)
        if values.size and not 0 <= values.min() <= values.max() <= steps:
            raise InputError(
                f"acceptance: expected 0 to {steps} accepted drafts a pass, found {values.min()} to {values.max()}. "
                "The passes were made with another number of draft steps."
            )
        row += np.bincount(values, minlength=steps + 1)
    return table


def bootstrap_ratio(
    numerators: np.ndarray, denominators: np.ndarray, *, confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    """Percentile interval of sum(numerators) / sum(denominators), resampling prompts (both arrays: one entry a prompt).

    Resamples whose denominator is zero are left out.
    """
    low, high = bootstrap(
        np.stack([numerators, denominators], 1), lambda s: s[:, 0] / s[:, 1], confidence, resamples, seed
    )
    return low, high


def bootstrap(
    rows: np.ndarray, statistic: Statistic, confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    """Percentile interval of a statistic of column sums, resampling the rows [prompts, columns] with replacement.

    `statistic` maps [resamples, columns] sums to [resamples] values; values that are not finite are left out.
    """
    rng = np.random.default_rng(seed)
    # how often each prompt is drawn, rather than which: one small matrix product makes all sums
    draws = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=resamples)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(draws @ rows.astype(np.float64))
        whole = statistic(rows.sum(0, dtype=np.float64)[None])
    values = values[np.isfinite(values)]
    if not values.size:  # few prompts, most of them empty
        values = whole
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _pooled(accepted: Accepted, *, steps: int, confidence: float, resamples: int, seed: int) -> CategoryAcceptance:
    table = count_accepted([counts for counts in accepted if counts], steps)
    passes = int(table.sum())
    if passes == 0:
        raise InputError(
            f"acceptance: expected at least one complete verify pass, found none in {len(accepted)} prompts. "
            f"Every answer ended within {steps + 1} tokens: raise probe.max_new_tokens or lower probe.steps."
        )
    at_least = table[:, ::-1].cumsum(1)[:, ::-1].sum(0)
    marginal = at_least[1:] / passes
    made = (table * np.arange(1, steps + 2)).sum(1)
    interval = bootstrap_ratio(made, table.sum(1), confidence=confidence, resamples=resamples, seed=seed)
    return CategoryAcceptance(
        acceptance_length=1 + float(marginal.sum()),
        interval=interval,
        marginal=marginal.tolist(),
        verify_passes=passes,
        prompts=len(table),
    )
