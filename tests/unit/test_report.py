"""report.json and its table, from what the stages of a run wrote."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ray_eagle.config import Config
from ray_eagle.errors import OriginError
from ray_eagle.probing.acceptance import acceptance
from ray_eagle.probing.breakeven import can_pay
from ray_eagle.probing.reports import Breakeven, BreakevenReport, BreakevenRow, Probe, ProbeReport
from ray_eagle.probing.speed import Timing, pool
from ray_eagle.probing.verdict import verdict
from ray_eagle.progress import Silent
from ray_eagle.report.model import Report, build_report, to_json
from ray_eagle.report.table import render
from ray_eagle.run import Origin, RunFolder
from ray_eagle.stages import Pipeline

STEPS = 3
NAMED_BY_THE_DESIGN = {
    "acceptance_length",
    "acceptance_interval",
    "marginal_acceptance",
    "predicted_acceptance_length",
    "break_even",
    "speedup",
    "verdict",
    "verify_passes",
    "prompts",
    "repeated_8gram_share",
    "stages",
    "target",
    "drafter",
    "versions",
}
TARGET = {"config": "c" * 16, "weights": "w" * 16}
HISTORY = [{"step": 10.0, "loss_0": 3.5}, {"step": 20.0, "loss_0": 2.5}]


def speed(rng: random.Random, needed: float) -> Any:
    timings = [Timing(0.1 * needed * c, c, 2 * c, 0.1 * c, c) for c in (rng.randint(3, 9) for _ in range(4))]
    return pool(timings, confidence=0.95, resamples=50, seed=0)


def probe_result(seed: int, *, needed: float = 1.5, predicted: bool = True, good: float = 0.8) -> Probe:
    """A probe as if served: random accepted counts, pooled and judged by the project's own functions."""
    rng = random.Random(seed)
    accepted = [[sum(rng.random() < good for _ in range(STEPS)) for _ in range(12)] for _ in range(9)]
    whole = acceptance(accepted, ["math", "chat", "code"] * 3, steps=STEPS, resamples=50)
    walked = acceptance([a[:-2] for a in accepted], ["math"] * 9, steps=STEPS, resamples=50)
    measured = speed(rng, needed)
    name, reasons = verdict(whole.interval, whole.acceptance_length, measured.break_even, STEPS)
    served = ProbeReport(
        steps=STEPS,
        max_new_tokens=16,
        prompts=9,
        acceptance=whole,
        acceptance_all_passes=whole,
        acceptance_without_repeats=walked,
        repeated_8gram_share=0.0625,
        speed=measured,
        break_even=measured.break_even,
        speedup=whole.acceptance_length / measured.break_even,
        verdict=name,
        reasons=reasons,
        plain_identical_share=0.75,
        differences=[],
        rows=[],
    )
    return Probe(served=served, predicted=walked if predicted else None, near_duplicates=2)


def breakeven_result(needed: dict[int, float]) -> Breakeven:
    rng = random.Random(0)
    rows = [BreakevenRow(steps=k, needed=r, can_pay=can_pay(r, k), speed=speed(rng, r)) for k, r in needed.items()]
    return Breakeven(measured=BreakevenReport(max_new_tokens=8, prompts=4, rows=rows))


class Bench:
    def __init__(self, folder: Path) -> None:
        self.run = RunFolder.open(str(folder))
        self.config = Config.model_validate({"run": str(folder), "target": {"path": "/models/big"}})

    def finish(self, stage: str, name: str = "", content: Any = None, **amounts: Any) -> None:
        known = {} if stage == "preflight" else {"target": TARGET, "target_path": "/models/big"}
        origin = {"stage": stage, "settings": {}, "inputs": {}, "target": {}, "finished": "now", **known, **amounts}
        self.run.write_origin(Origin.model_validate(origin))
        if name:
            self.run.of(stage).write_json(name, content.model_dump() if hasattr(content, "model_dump") else content)

    def whole(self, probe: Probe) -> None:
        self.finish("preflight", seconds=1.0, bytes=10)
        self.finish("breakeven", "breakeven.json", breakeven_result({1: 1.25, 3: 1.75}), seconds=2.0, bytes=20)
        self.finish("generate", seconds=30.0, bytes=4_000, samples=300, tokens=7_000)
        self.finish("extract", seconds=40.0, bytes=5_000_000, samples=299, tokens=12_345)
        self.finish("vocab", seconds=1.0, bytes=70)
        self.finish("train", "training.json", {"best": {}, "history": HISTORY}, seconds=60.0, bytes=800, tokens=9)
        self.run.folder("checkpoints").write_bytes("step-1/state.pt", b"x" * 1000)
        self.finish("probe", "probe.json", probe, seconds=5.0, bytes=90, samples=9)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "run")


def table(report: Report) -> str:
    console = Console(width=500, record=True, file=io.StringIO())
    console.print(render(report))
    return console.export_text()


def cells(text: str, label: str) -> list[str]:
    line = next(line for line in text.splitlines() if label in line)
    return [cell.strip() for cell in line.strip("│┃ ").split("│")]


@pytest.mark.parametrize("seed", range(4))
def test_a_whole_run_is_reported_with_every_figure_of_its_probe(bench: Bench, seed: int) -> None:
    probe = probe_result(seed)
    bench.whole(probe)
    report = build_report(bench.config, bench.run)
    served = probe.served
    assert probe.predicted is not None
    assert report.acceptance_length == served.acceptance.acceptance_length
    assert report.acceptance_interval == served.acceptance.interval
    assert report.marginal_acceptance == served.acceptance.marginal
    assert report.acceptance_length == pytest.approx(1 + sum(report.marginal_acceptance))
    assert report.predicted_acceptance_length == probe.predicted.acceptance_length
    assert report.by_category.keys() == {"chat", "code", "math"}
    assert (report.break_even, report.speedup) == (served.break_even, served.speedup)
    assert report.speedup == pytest.approx(report.acceptance_length / report.break_even)
    assert report.break_even_before_training == {1: 1.25, 3: 1.75}
    assert (report.verdict, report.verify_passes, report.prompts) == (served.verdict, 108, 9)
    assert (report.repeated_8gram_share, report.near_duplicates) == (0.0625, 2)
    assert report.drafter == bench.run.of("train").path
    assert report.target == {"path": "/models/big", **TARGET}
    assert report.curves == HISTORY
    assert list(report.stages) == ["preflight", "breakeven", "generate", "extract", "vocab", "train", "probe"]
    extract = report.stages["extract"]
    assert (extract.seconds, extract.bytes, extract.samples, extract.tokens) == (40.0, 5_000_000, 299, 12_345)
    assert report.stages["train"].bytes == 1800  # checkpoints included
    assert report.versions["ray_eagle"]


def test_report_json_holds_what_the_design_names_and_reads_back_the_same(bench: Bench) -> None:
    bench.whole(probe_result(1))
    outcome = Pipeline(bench.config, bench.run, Silent()).stage("report")
    text = bench.run.of("report").read_bytes("report.json").decode()
    content = json.loads(text)
    assert content.keys() >= NAMED_BY_THE_DESIGN
    assert all(content[key] not in (None, [], {}) for key in NAMED_BY_THE_DESIGN)
    assert len(content["marginal_acceptance"]) == STEPS
    assert len(content["acceptance_interval"]) == 2
    assert all(stage.keys() == {"seconds", "bytes", "samples", "tokens"} for stage in content["stages"].values())
    report = build_report(bench.config, bench.run)
    assert Report.model_validate_json(text) == report
    assert outcome is not None
    assert outcome.facts == content == to_json(report)


def test_the_table_shows_the_figures(bench: Bench) -> None:
    bench.whole(probe_result(2))
    report = build_report(bench.config, bench.run)
    assert report.acceptance_interval is not None
    assert report.predicted_interval is not None
    text = table(report)
    low, high = report.acceptance_interval
    p_low, p_high = report.predicted_interval
    assert cells(text, "acceptance length")[1:] == [
        f"{report.acceptance_length:.3f}",
        f"{report.predicted_acceptance_length:.3f}",
    ]
    assert cells(text, "95 % interval")[1:] == [f"{low:.3f} to {high:.3f}", f"{p_low:.3f} to {p_high:.3f}"]
    for i, (served, walked) in enumerate(zip(report.marginal_acceptance, report.predicted_marginal, strict=True), 1):
        assert cells(text, f"at least {i} draft")[1:] == [f"{served:.1%}", f"{walked:.1%}"]
    assert cells(text, "prompts / verify passes")[1] == "9 / 108"
    assert cells(text, "break-even (needed")[1] == f"{report.break_even:.3f}"
    assert cells(text, "before training")[1] == "1: 1.25, 3: 1.75"
    assert cells(text, "speed-up")[1] == f"{report.speedup:.2f}x"
    assert cells(text, "repeated 8-grams in")[1] == "6.2%"
    assert cells(text, "answers identical")[1] == "75.0%"
    assert cells(text, "extract") == ["extract", "40", "299", "12,345", "5 MB"]
    assert cells(text, "all  ")[1] == "139"
    assert f"Verdict: {report.verdict}" in text
    assert f"Drafter: {report.drafter}" in text
    assert all(reason in text for reason in report.reasons)


@pytest.mark.parametrize(
    ("needed", "good", "expected"),
    [(1.5, 0.9, "serve"), (4.5, 0.9, "not-worth-it"), (3.9, 0.7, "fine-tune"), (1.5, 0.0, "broken")],
)
def test_the_verdict_is_the_probes(bench: Bench, needed: float, good: float, expected: str) -> None:
    bench.whole(probe_result(3, needed=needed, good=good))
    report = build_report(bench.config, bench.run)
    assert report.verdict == expected
    assert report.reasons
    assert f"Verdict: {expected}" in table(report)


@pytest.mark.parametrize(
    ("needed", "expected"),
    [({1: 2.0, 2: 3.5, 3: 4.0}, "not-worth-it"), ({1: 2.5, 2: 2.9, 3: 4.2}, None), ({3: 3.99}, None)],
)
def test_a_run_that_stopped_after_break_even_says_why(
    bench: Bench, needed: dict[int, float], expected: str | None
) -> None:
    bench.finish("preflight", seconds=1.0)
    bench.finish("breakeven", "breakeven.json", breakeven_result(needed), seconds=2.0)
    report = build_report(bench.config, bench.run)
    assert report.verdict == expected
    assert report.break_even == needed[3]
    assert report.break_even_before_training == needed
    assert bool(report.reasons) == (expected is not None)
    assert (report.acceptance_length, report.drafter, report.verify_passes) == (None, None, 0)
    assert Report.model_validate(json.loads(json.dumps(to_json(report)))) == report
    text = table(report)
    assert cells(text, "acceptance length")[1:] == ["-", "-"]
    assert f"Verdict: {expected or 'none yet'}" in text


@pytest.mark.parametrize(("cycle_ms", "expected"), [(30.0, None), (49.0, "not-worth-it")])
def test_arithmetic_alone_is_judged_too(bench: Bench, cycle_ms: float, expected: str | None) -> None:
    rates = {"baseline_tps": 82.0, "cycle_ms": cycle_ms}
    config = Config.model_validate({"target": {"path": "/models/big"}, "breakeven": rates})
    Pipeline(config, bench.run, Silent()).stage("breakeven")
    report = build_report(config, bench.run)
    assert report.break_even == pytest.approx(82 * cycle_ms / 1000)
    assert report.verdict == expected
    assert report.target == {"path": "/models/big"}


def test_a_given_drafter_that_was_probed_and_not_trained_is_the_one_reported(bench: Bench) -> None:
    bench.config = Config.model_validate({"drafter": {"path": "/models/given"}, "probe": {"steps": 2}})
    probe = probe_result(5, predicted=False)
    bench.finish("probe-given", "probe.json", probe, seconds=5.0)
    report = build_report(bench.config, bench.run)
    assert report.drafter == "/models/given"
    assert report.steps == STEPS  # as served
    assert report.acceptance_length == probe.served.acceptance.acceptance_length
    assert report.predicted_acceptance_length is None
    assert cells(table(report), "at least 1 draft")[2] == "-"
    bench.finish("train", "training.json", {"best": {}, "history": HISTORY})
    assert build_report(bench.config, bench.run).drafter == "/models/given"  # the trained one was not probed yet
    bench.whole(probe_result(6))
    assert build_report(bench.config, bench.run).drafter == bench.run.of("train").path


def test_an_empty_run_has_nothing_to_report(bench: Bench) -> None:
    bench.run.write_origin(Origin(stage="generate", settings={}, inputs={}, target={}))  # not finished
    with pytest.raises(OriginError, match="expected a finished stage to report on, found none"):
        build_report(bench.config, bench.run)
