"""A probe's figures against slow twins, its verdicts, and the settings that are refused."""

import random
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from ray_eagle.config import Config
from ray_eagle.probing.acceptance import acceptance
from ray_eagle.probing.differences import differences_from
from ray_eagle.probing.reports import evenly, length_bucket, mean_context
from ray_eagle.probing.speed import Timing, speedup_interval
from ray_eagle.probing.verdict import CHECKS, FEW_PASSES, verdict
from ray_eagle.serving.engine import Speculation
from tests.unit.test_sweep import PROMPTS, reply


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_of_the_speed_up_resamples_prompts_whole(seed: int) -> None:
    rng = random.Random(seed)
    made = np.array([rng.randint(20, 60) for _ in range(25)], dtype=float)
    passes = np.array([rng.randint(10, 20) for _ in range(25)], dtype=float)
    timings = [
        None
        if i % 3
        else Timing(rng.uniform(0.2, 0.4), rng.randint(8, 12), 1, rng.uniform(0.2, 0.3), rng.randint(15, 25))
        for i in range(25)
    ]
    found = speedup_interval(made, passes, timings, confidence=0.9, resamples=4000, seed=seed)
    values = []
    for _ in range(4000):
        drawn = [rng.randrange(25) for _ in range(25)]
        timed = [t for i in drawn if (t := timings[i])]
        if timed:
            cycle = sum(t.cycle_seconds for t in timed) / sum(t.cycles for t in timed)
            plain = sum(t.plain_seconds for t in timed) / sum(t.plain_tokens for t in timed)
            values.append(sum(made[i] for i in drawn) / sum(passes[i] for i in drawn) / (cycle / plain))
    assert found == pytest.approx(tuple(np.quantile(values, [0.05, 0.95])), rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_mean_context_is_over_every_token(seed: int) -> None:
    rng = random.Random(seed)
    replies = [reply([0] * rng.randint(1, 50), [1] * rng.randint(1, 50), [], 0.0) for _ in range(6)]
    positions = [r.prompt_length + i for r in replies for i in range(len(r.tokens))]
    assert mean_context(replies) == pytest.approx(sum(positions) / len(positions))


def test_length_buckets() -> None:
    lengths = (1, 127, 128, 511, 512, 2047, 2048, 99999)
    names = ["< 128", "< 128", "128-511", "128-511", "512-2047", "512-2047", ">= 2048", ">= 2048"]
    assert [length_bucket(n) for n in lengths] == names


def test_some_prompts_are_spread_evenly() -> None:
    assert evenly(10, 3) == [0, 4, 9] and evenly(3, 9) == [0, 1, 2] and evenly(1, 1) == [0]


def test_a_gap_counts_only_where_the_plain_answer_came_the_same_way() -> None:
    plain = {0: reply([1], [5, 6, 7], [], 0.1), 1: reply([1], [5, 6, 7], [], 0.1)}
    made = [reply([1], [5, 6, 8], [], 0.1), reply([1], [5, 9, 7], [], 0.1)]
    again = {
        0: plain[0].model_copy(update={"gaps": [3.0, 2.0, 0.1]}),
        1: reply([1], [4, 6, 7], [], 0.1).model_copy(update={"gaps": [1.0, 1.0, 1.0]}),
    }
    found = differences_from(PROMPTS, made, plain, again)
    assert [(d.id, d.index, d.gap) for d in found] == [("p0", 2, 0.1), ("p1", 1, None)]


def test_a_verdict_names_the_engine_when_the_walk_saw_clearly_more() -> None:
    high = (2.9, (2.8, 3.0))
    name, reasons = verdict((1.5, 1.7), 1.6, 2.0, 3, predicted=high)
    assert name == "broken" and "the engine is at fault" in reasons[1] and reasons[2:] == list(CHECKS)
    name, reasons = verdict((1.0, 1.01), 1.0, 2.0, 3, predicted=high)
    assert name == "broken" and "the engine is at fault" in reasons[0]
    name, reasons = verdict((2.2, 2.4), 2.3, 2.0, 3, predicted=high, flags=["--a", "b"])
    assert name == "serve" and "Serve it with `--a b`." in reasons and "the engine is at fault" in reasons[-1]
    name, reasons = verdict((1.5, 1.7), 1.6, 2.0, 3, predicted=(1.65, (1.6, 1.7)))
    assert name == "fine-tune" and "would have to pass 2.06" in reasons[-1]


def test_a_drafter_that_the_walk_finds_as_weak_is_not_the_engines_fault() -> None:
    name, reasons = verdict((1.0, 1.01), 1.0, 2.0, 3, predicted=(1.01, (1.0, 1.02)), passes=400)
    assert name == "broken" and not set(reasons) & set(CHECKS)
    assert reasons[0].startswith(
        "The walk over captured states predicts the same, 1.01 [1.00, 1.02]: the drafter itself"
    )
    unlike = (1.3, (1.0, 1.6))  # neither the same nor clearly more
    assert verdict((1.0, 1.01), 1.0, 2.0, 3, predicted=unlike, passes=400)[1][1:] == list(CHECKS)


@pytest.mark.parametrize(
    ("passes", "words"), [(29, "more prompts would decide"), (30, "Layer ids"), (None, "Layer ids")]
)
def test_a_few_passes_without_an_accepted_draft_blame_nobody(passes: int | None, words: str) -> None:
    for predicted, first in (
        (None, "Acceptance length 1.00"),
        ((1.0, (1.0, 1.0)), "The walk"),
        ((2.9, (2.8, 3.0)), ""),
    ):
        _, reasons = verdict((1.0, 1.0), 1.0, 2.0, 3, predicted=predicted, passes=passes)
        assert reasons[0].startswith(first)
        assert bool(set(reasons) & set(CHECKS)) == (passes != 29 and first != "The walk")
        assert (words in " ".join(reasons)) == (passes == 29 or first != "The walk")
    assert 0.9**FEW_PASSES < 0.05 < 0.9 ** (FEW_PASSES - 2)


@pytest.mark.parametrize("seed", range(20))
def test_reasons_read_as_sentences(seed: int) -> None:
    rng = random.Random(seed)
    served, predicted = rng.uniform(1, 4), rng.uniform(1, 4)
    _, reasons = verdict(
        (max(1.0, served - rng.random()), served + rng.random()), served, rng.uniform(0.9, 4.5), 3,
        speedup_interval=rng.choice([None, (0.9, 1.1), (1.1, 1.2)]),
        predicted=rng.choice([None, (predicted, (predicted - 0.1, predicted + 0.1))]),
        flags=rng.choice([[], ["--a", "b"]]), unchecked=rng.random() < 0.3, passes=rng.choice([None, 5, 500]),
    )  # fmt: skip
    assert reasons and all(reason.endswith(".") and reason[0].isupper() for reason in reasons), reasons


def test_a_verdict_waits_for_the_speed_ups_own_interval() -> None:
    assert verdict((2.1, 2.3), 2.2, 2.0, 3, speedup_interval=(1.01, 1.2))[0] == "serve"
    assert verdict((2.1, 2.3), 2.2, 2.0, 3, speedup_interval=(0.97, 1.2))[0] == "fine-tune"


def test_text_that_is_not_the_targets_outweighs_every_figure() -> None:
    name, reasons = verdict((2.9, 3.1), 3.0, 1.5, 3, faults=["It parts at p7."])
    assert name == "broken" and "It parts at p7." in reasons


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probe": {"concurrencies": [4]}}, "decodes 1 at once: set serve.engine"),
        ({"breakeven": {"concurrencies": [1, 32]}, "serve": {"engine": "sglang"}}, "raise serve.max_running"),
        ({"probe": {"topk": 4}}, "only the sglang engine drafts trees"),
        ({"probe": {"sweep": [{"steps": 3, "topk": 2}]}, "serve": {"engine": "vllm"}}, "drafts trees"),
        ({"probe": {"temperature": 0.7}}, "greedy"),
        ({"probe": {"draft_tokens": 8}}, "leave it out"),
        ({"probe": {"concurrencies": []}}, "at least 1 item"),
    ],
)
def test_settings_that_the_engine_cannot_do_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate(settings)


def test_a_server_elsewhere_may_do_what_this_engine_cannot() -> None:
    settings = {"probe": {"url": "http://there", "concurrencies": [8], "topk": 4, "temperature": 0.5}}
    assert Config.model_validate(settings).probe.concurrencies == (8,)


def test_a_setting_verifies_its_whole_chain_unless_told() -> None:
    assert Speculation(steps=3) == Speculation(steps=3, topk=1, draft_tokens=4)
    assert Speculation(steps=5, topk=4, draft_tokens=16).name == "5 steps, topk 4, 16 tokens"
    assert Speculation(steps=5).name == "5 steps"


def test_by_length_pools_passes_as_by_category() -> None:
    whole = acceptance([[1, 2], [3], []], ["x", "y", "y"], steps=3, resamples=10)
    assert {k: v.verify_passes for k, v in whole.by_category.items()} == {"x": 2, "y": 1}
