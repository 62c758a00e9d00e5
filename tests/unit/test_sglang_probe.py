"""What a probe makes of an sglang engine: measurements that are refused, and text that is not the target's."""

from pathlib import Path
from typing import Any

import pytest

from ray_eagle.errors import InputError, ServingError
from ray_eagle.probing.reports import ProbePrompt, ProbeReport
from ray_eagle.probing.sweep import run_breakeven_sweep, run_sweep
from ray_eagle.serving.engine import EngineFacts, Speculation, Work
from ray_eagle.serving.messages import GenerateReply
from ray_eagle.serving.server import _Gate
from tests.standin import expected_passes
from tests.unit import test_sglang_engine
from tests.unit.test_sglang_engine import start

own_state, engine = test_sglang_engine.own_state, test_sglang_engine.engine

PROMPTS = [
    ProbePrompt(id=f"p{i}", category=("even", "odd")[i % 2], input_ids=[*range(1 + i), 30 * i % 180]) for i in range(8)
]


class Local:
    """The probe's client of an engine in this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def configure(self, speculation: Speculation | None) -> EngineFacts:
        self._engine.configure(speculation)
        return self.engine()

    def engine(self) -> EngineFacts:
        return self._engine.facts()

    def decode(
        self,
        *,
        prompts: list[list[int]],
        max_new_tokens: int,
        concurrency: int,
        temperature: float = 0,
        gaps: bool = False,
        past_end: bool = False,
    ) -> list[GenerateReply]:
        work = [Work(ids, max_new_tokens, temperature, gaps, past_end) for ids in prompts]
        made = self._engine.generate(work, concurrency)
        return [GenerateReply(text="", prompt_length=len(p), **vars(a)) for p, a in zip(prompts, made, strict=True)]


def probed(engine: Any, prompts: list[ProbePrompt], concurrency: int, **options: Any) -> ProbeReport:
    return run_sweep(
        Local(engine),
        prompts,
        settings=[Speculation(steps=3)],
        concurrencies=[concurrency],
        max_new_tokens=40,
        plain_prompts=4,
        resamples=100,
        **options,
    )


def test_break_even_with_a_random_drafter(engine: Any) -> None:
    report = run_breakeven_sweep(
        Local(engine),
        PROMPTS,
        settings=[Speculation(steps=3)],
        concurrencies=[1, 4],
        max_new_tokens=30,
        resamples=100,
    )
    assert [(row.steps, row.concurrency) for row in report.rows] == [(3, 1), (3, 4)]
    for row in report.rows:
        # a cycle of the stand-in takes 1.15 plain steps, and what a busy machine makes of it
        assert 0.3 < row.needed == row.speed.break_even < 4
        assert row.can_pay == (row.needed < 4)
        assert row.mean_context == pytest.approx(sum(len(p.input_ids) for p in PROMPTS) / 8 + 14.5)


@pytest.mark.parametrize("share", [None, 0.4])
def test_break_even_is_measured_as_if_drafts_were_accepted(tmp_path: Path, share: float | None) -> None:
    """And the server says so of itself, and drafts in earnest again afterwards."""
    engine = start(tmp_path, memory_share=share)
    seen: list[tuple[float | None, list[int]]] = []

    class Watched(Local):
        def decode(self, **request: Any) -> list[GenerateReply]:
            replies = super().decode(**request)
            now = engine.facts().speculation
            seen.extend((now and now.simulated, [p.accepted for p in reply.passes]) for reply in replies)
            assert request["past_end"]
            return replies

    setting = Speculation(steps=3, simulated=2.5)
    report = run_breakeven_sweep(
        Watched(engine), PROMPTS, settings=[setting], concurrencies=[2], max_new_tokens=30, resamples=100
    )
    assert engine.facts().simulated == []
    engine.configure(Speculation(steps=3))
    [answer] = engine.generate([Work([5, 6, 7], 40)])
    engine.close()
    assert [(p.start, p.accepted) for p in answer.passes] == expected_passes([5, 6, 7], 40, 3)
    assert [row.simulated for row in report.rows] == [2.5]
    assert any("each yielded 2.5 tokens" in note for note in report.notes)
    for simulated, accepted in seen:
        assert simulated in (2.5, None) and bool(accepted) == (simulated is not None)
        if len(accepted) > 4:  # not one that warms up
            assert 2.4 <= 1 + sum(accepted) / len(accepted) <= 2.6
    assert sum(simulated is None for simulated, _ in seen) == sum(simulated is not None for simulated, _ in seen)


def test_a_drafter_is_never_judged_by_simulated_acceptance(engine: Any) -> None:
    with pytest.raises(InputError, match="in earnest, found simulated acceptance"):
        run_sweep(
            Local(engine),
            PROMPTS,
            settings=[Speculation(steps=3, simulated=2.5)],
            concurrencies=[1],
            max_new_tokens=8,
            plain_prompts=2,
        )


def test_two_servers_take_turns_and_each_is_the_same_all_along(tmp_path: Path) -> None:
    engine = start(tmp_path, memory_share=0.4)
    report = probed(engine, PROMPTS, 2)
    engine.close()
    assert report.plain_identical_share == 1.0 and report.sweep[0].prompts_timed == 4
    assert not any("one after the other" in note for note in report.notes)


@pytest.mark.parametrize(
    ("mode", "env", "message"),
    [
        ("small", {}, r"expected 4 requests at once.*at most 2"),
        ("ok", {"SGLANG_SIMULATE_ACC_LEN": "2.5"}, r"simulated \(SGLANG_SIMULATE_ACC_LEN=2\.5\)"),
        ("restarts", {}, "expected one server all along"),
    ],
)
def test_what_would_falsify_a_measurement_is_refused(
    tmp_path: Path, mode: str, env: dict[str, str], message: str
) -> None:
    engine = start(tmp_path, mode=mode, env=env)
    (tmp_path / "file").touch()
    with pytest.raises(ServingError, match=message):
        probed(engine, PROMPTS, 4)
    engine.close()


def test_requests_of_others_falsify_a_measurement(engine: Any) -> None:
    class Shared(Local):
        def decode(self, **request: Any) -> list[GenerateReply]:
            engine.generate([Work([7], 4)])
            return super().decode(**request)

    with pytest.raises(ServingError, match="only this measurement uses"):
        run_breakeven_sweep(
            Shared(engine), PROMPTS[:2], settings=[Speculation(steps=3)], concurrencies=[1], max_new_tokens=8
        )


def test_the_gate_tells_whether_others_were_inside() -> None:
    gate = _Gate()
    with gate.together() as first:
        assert first()
        with gate.together() as second:
            assert not first() and not second()
        assert not first() and gate.inside == 1
    with gate.together() as third:
        assert third() and gate.entered.total() == 3


@pytest.mark.parametrize(("mode", "verdict"), [("unequal", "serve"), ("unequal-far", "broken")])
def test_text_that_is_not_the_targets_is_excused_only_where_rounding_explains_it(
    tmp_path: Path, mode: str, verdict: str
) -> None:
    engine = start(tmp_path, mode=mode)
    report = probed(engine, [ProbePrompt(id=f"p{i}", category="all", input_ids=[i, 50]) for i in range(4)], 1)
    engine.close()
    gap = 1.5 if verdict == "broken" else 0.125
    assert [(d.id, d.index, pytest.approx(d.gap)) for d in report.differences] == [("p2", 3, gap)]
    assert report.plain_identical_share == 0.75
    assert report.verdict == verdict
    assert ("p2 at token 3 (gap 1.50)" in " ".join(report.reasons)) == (verdict == "broken")


def test_sampled_text_is_not_compared(tmp_path: Path) -> None:
    engine = start(tmp_path, mode="unequal-far")
    report = probed(engine, PROMPTS, 1, temperature=0.8)
    engine.close()
    assert report.plain_identical_share is None and report.differences == [] and report.verdict == "serve"
