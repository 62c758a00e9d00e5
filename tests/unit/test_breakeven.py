"""Break-even arithmetic and the verdict, by table."""

import pytest

from ray_eagle.errors import InputError
from ray_eagle.probing.breakeven import break_even, break_even_from_rates, can_pay, speedup
from ray_eagle.probing.verdict import CHECKS, verdict


def test_the_founding_case() -> None:
    """Plain 82 tok/s (12.2 ms), cycle 30 ms: 2.46 accepted tokens a pass break even; 60 tok/s were served."""
    r = break_even_from_rates(82, 30)
    assert r == pytest.approx(2.46)
    assert 82 * speedup(1.8, r) == pytest.approx(60)


def test_break_even_is_the_ratio_of_the_two_times() -> None:
    assert break_even(0.030, 0.012) == pytest.approx(2.5)
    assert speedup(2.5, break_even(0.030, 0.012)) == pytest.approx(1.0)


@pytest.mark.parametrize(("cycle", "plain"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_times_that_are_not_positive_are_refused(cycle: float, plain: float) -> None:
    with pytest.raises(InputError, match="above 0 s"):
        break_even(cycle, plain)


@pytest.mark.parametrize(
    ("r", "steps", "expected"), [(2.46, 1, False), (2.46, 2, True), (2.0, 1, False), (1.99, 1, True)]
)
def test_no_drafter_pays_once_break_even_reaches_a_perfect_one(r: float, steps: int, expected: bool) -> None:
    assert can_pay(r, steps) is expected


@pytest.mark.parametrize(
    ("interval", "tau", "r", "steps", "name", "words"),
    [
        ((2.7, 3.1), 2.9, 2.46, 3, "serve", "1.18 times as fast"),
        ((1.02, 1.0), 1.0, 2.46, 3, "broken", "not distinguishable from 1"),
        ((1.0, 1.01), 1.0, 0.9, 3, "broken", "Check"),
        ((1.7, 1.9), 1.8, 2.46, 3, "fine-tune", "misses break-even by 0.66"),
        ((2.3, 2.7), 2.5, 2.46, 3, "fine-tune", "more prompts would decide"),
        ((2.2, 2.6), 2.4, 2.46, 3, "fine-tune", "more prompts would decide"),
        ((2.46, 2.9), 2.7, 2.46, 3, "fine-tune", "more prompts would decide"),
        ((3.7, 3.9), 3.8, 4.0, 3, "not-worth-it", "no drafter can exceed 4"),
        ((1.0, 1.0), 1.0, 5.0, 3, "not-worth-it", "another number of draft steps"),
    ],
)
def test_verdict(interval: tuple[float, float], tau: float, r: float, steps: int, name: str, words: str) -> None:
    found, reasons = verdict(interval, tau, r, steps)
    assert found == name
    assert words in " ".join(reasons)


def test_a_broken_drafter_comes_with_every_known_cause() -> None:
    _, reasons = verdict((1.0, 1.01), 1.0, 2.0, 3)
    assert reasons[1:] == list(CHECKS)
    for word in ("layer ids", "head", "vocabulary map", "context", "RoPE", "chat template"):
        assert any(reason.startswith(word) for reason in reasons)


def test_an_interval_that_contains_break_even_does_not_claim_a_miss_when_the_estimate_is_above() -> None:
    _, reasons = verdict((2.3, 2.7), 2.5, 2.46, 3)
    assert not any("misses" in reason for reason in reasons)
