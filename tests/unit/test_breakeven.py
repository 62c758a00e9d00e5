"""Break-even arithmetic, the verdict, and the probe's bookkeeping on scripted answers."""

import numpy as np
import pytest

from ray_eagle.errors import InputError
from ray_eagle.probing.breakeven import break_even, break_even_from_rates, can_pay, speedup
from ray_eagle.probing.probe import ProbePrompt, run_breakeven, run_probe
from ray_eagle.probing.speed import Timing, pool
from ray_eagle.probing.verdict import CHECKS, verdict
from ray_eagle.serving.generation import VerifyPass
from ray_eagle.serving.messages import GenerateReply


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
        ((1.0, 1.01), 1.0, 0.9, 3, "broken", "Layer ids: the engine must"),
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
    for word in ("Layer ids", "Head", "Vocabulary map", "Context", "RoPE", "Chat template"):
        assert any(reason.startswith(word) for reason in reasons)


def test_an_interval_that_contains_break_even_does_not_claim_a_miss_when_the_estimate_is_above() -> None:
    _, reasons = verdict((2.3, 2.7), 2.5, 2.46, 3)
    assert not any("misses" in reason for reason in reasons)


@pytest.mark.parametrize("seed", range(5))
def test_speed_is_pooled_over_prompts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    timings = [
        Timing(seconds, int(rng.integers(5, 20)), 40, float(rng.uniform(0.5, 2)), int(rng.integers(20, 40)))
        for seconds in rng.uniform(0.5, 2, size=12).tolist()
    ]
    speed = pool(timings, confidence=0.9, resamples=3000, seed=0)
    cycle = sum(t.cycle_seconds for t in timings) / sum(t.cycles for t in timings)
    plain = sum(t.plain_seconds for t in timings) / sum(t.plain_tokens for t in timings)
    assert speed.break_even == pytest.approx(cycle / plain)
    assert (speed.cycle_seconds, speed.plain_step_seconds) == (pytest.approx(cycle), pytest.approx(plain))
    assert speed.plain_tokens_per_second == pytest.approx(1 / plain)
    assert speed.speculative_tokens_per_second == pytest.approx(480 / sum(t.cycle_seconds for t in timings))
    values = []
    for _ in range(3000):
        drawn = [timings[int(i)] for i in rng.integers(0, 12, size=12)]
        cycle = sum(t.cycle_seconds for t in drawn) / sum(t.cycles for t in drawn)
        values.append(cycle / (sum(t.plain_seconds for t in drawn) / sum(t.plain_tokens for t in drawn)))
    assert speed.break_even_interval == pytest.approx(tuple(np.quantile(values, [0.05, 0.95])), rel=0.06)


def test_answers_of_one_token_cannot_be_timed() -> None:
    with pytest.raises(InputError, match="first token"):
        pool([Timing(0.0, 0, 0, 0.0, 0)], confidence=0.95, resamples=10, seed=0)
    speed = pool([Timing(0.0, 0, 0, 0.0, 0), Timing(1.0, 2, 4, 1.0, 4)], confidence=0.95, resamples=1, seed=0)
    assert speed.break_even == pytest.approx(2.0)


class Scripted:
    """Answers 0, 1, 2, ...; every pass accepts one of the drafts; a cycle takes 30 ms and a plain step 12 ms."""

    def __init__(self, *, loop: int = 10**6, wrong_at: int | None = None) -> None:
        self.calls: list[tuple[int, int, int, bool]] = []
        self.loop, self.wrong_at = loop, wrong_at

    def generate(self, *, input_ids: list[int], max_new_tokens: int, steps: int, plain: bool) -> GenerateReply:
        self.calls.append((input_ids[0], max_new_tokens, steps, plain))
        tokens = [i % self.loop for i in range(max_new_tokens)]
        if plain and self.wrong_at is not None and input_ids[0] == 2:
            tokens[self.wrong_at] += 1
        starts = [] if plain else range(len(input_ids) - 1, len(input_ids) + max_new_tokens - 2, 2)
        passes = [VerifyPass(start, [0] * steps, 1, 0) for start in starts]
        seconds = 0.012 * (max_new_tokens - 1) if plain else 0.030 * len(passes)
        return GenerateReply(
            text="",
            tokens=tokens,
            prompt_length=len(input_ids),
            passes=passes,
            finish_reason="length",
            prefill_seconds=9.0,
            decode_seconds=seconds + 5.0,  # a hiccup, which must not count
            decode_tokens=max_new_tokens - 1,
            step_seconds=0.012 if plain else 0.030,
        )


SCRIPT = [ProbePrompt(id=f"p{i}", category="ab"[i % 2], input_ids=[i, 7, 7]) for i in range(5)]


def test_the_probe_warms_up_then_decodes_plainly_right_after() -> None:
    client = Scripted()
    report = run_probe(client, SCRIPT, steps=3, max_new_tokens=40, plain_prompts=3)
    assert client.calls == [
        (0, 8, 1, True),
        (0, 8, 3, False),
        (0, 40, 3, False),
        (0, 40, 3, True),
        (1, 40, 3, False),
        (2, 40, 3, False),
        (2, 40, 3, True),
        (3, 40, 3, False),
        (4, 40, 3, False),
        (4, 40, 3, True),
    ]
    assert report.break_even == pytest.approx(2.5)
    assert report.speed.break_even_interval == pytest.approx((2.5, 2.5))
    assert (report.speed.prompts, report.speed.plain_tokens, report.speed.cycles) == (3, 3 * 39, 3 * 20)
    assert report.acceptance.acceptance_length == 2.0
    assert report.speedup == pytest.approx(0.8)
    assert (report.verdict, report.prompts) == ("fine-tune", 5)


def test_the_probe_keeps_complete_and_cut_passes_apart() -> None:
    """40 tokens after a prompt of 3: last index 42. Passes start at 2, 4, .. 40; those from 40 on leave the answer."""
    report = run_probe(Scripted(), SCRIPT, steps=3, max_new_tokens=40, plain_prompts=1)
    row = report.rows[0]
    assert row.starts == list(range(2, 39, 2))
    assert row.cut == [1]
    assert report.acceptance.verify_passes == 5 * 19
    assert report.acceptance_all_passes.verify_passes == 5 * 20


def test_the_probe_names_each_answer_that_differs_from_plain_text() -> None:
    report = run_probe(Scripted(wrong_at=11), SCRIPT, steps=3, max_new_tokens=40, plain_prompts=99)
    assert [(d.id, d.index) for d in report.differences] == [("p2", 11)]
    assert report.plain_identical_share == pytest.approx(0.8)


def test_the_probe_tells_acceptance_inside_loops_apart() -> None:
    assert run_probe(Scripted(), SCRIPT, steps=3, max_new_tokens=40, plain_prompts=1).repeated_8gram_share == 0
    report = run_probe(Scripted(loop=10), SCRIPT, steps=3, max_new_tokens=40, plain_prompts=1)
    # 33 8-grams of an answer, the first 10 of them new; first drafts at 1, 3, .. 37, repeated from 17 on
    assert report.repeated_8gram_share == pytest.approx(23 / 33)
    assert report.acceptance_without_repeats is not None
    assert report.acceptance_without_repeats.verify_passes == 5 * 8


def test_the_sweep_measures_every_setting_on_the_same_prompts() -> None:
    client = Scripted()
    report = run_breakeven(client, SCRIPT[:2], (1, 2), max_new_tokens=20)
    assert client.calls[3:] == [
        (0, 20, 1, True),
        (0, 20, 1, False),
        (0, 20, 2, False),
        (1, 20, 1, True),
        (1, 20, 1, False),
        (1, 20, 2, False),
    ]
    assert [(row.steps, row.can_pay) for row in report.rows] == [(1, False), (2, True)]
    assert all(row.needed == pytest.approx(2.5) for row in report.rows)
    with pytest.raises(InputError, match=r"breakeven\.steps"):
        run_breakeven(client, SCRIPT, (), max_new_tokens=20)
