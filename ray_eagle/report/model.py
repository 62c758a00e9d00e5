"""report.json: the whole result of a run. The terminal table is a view of it."""

from typing import Any, Literal

from pydantic import BaseModel

from ray_eagle.config import Config
from ray_eagle.errors import OriginError
from ray_eagle.probing.breakeven import can_pay
from ray_eagle.probing.reports import Breakeven, Probe, SweepRow
from ray_eagle.run import CHECKPOINTS, FOLDERS, RunFolder
from ray_eagle.stage import versions

Verdict = Literal["serve", "fine-tune", "not-worth-it", "broken"]


class StageReport(BaseModel):
    seconds: float
    bytes: int
    samples: int
    tokens: int


class Report(BaseModel):
    """Figures of one drafter on one target and machine; acceptance is None when no drafter was probed."""

    acceptance_length: float | None = None
    """Served, over held-out prompts, pooled over complete verify passes."""
    acceptance_interval: tuple[float, float] | None = None
    marginal_acceptance: list[float] = []
    """Share of passes that accepted at least i drafts, i = 1..K."""
    histogram: list[int] = []
    """Passes that accepted j drafts, j = 0..K."""
    predicted_acceptance_length: float | None = None
    """By walking over captured held-out states, without a server."""
    predicted_interval: tuple[float, float] | None = None
    predicted_marginal: list[float] = []
    acceptance_without_repeats: float | None = None
    repeated_8gram_share: float | None = None
    by_category: dict[str, float] = {}
    break_even: float | None = None
    """R at `steps` draft steps: measured with the probed drafter, else with a random one."""
    break_even_interval: tuple[float, float] | None = None
    break_even_before_training: dict[int, float] = {}
    """R by number of draft steps, with a random drafter."""
    confidence: float
    """Of the intervals."""
    steps: int
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
    concurrency: int = 1
    """Requests at once, for speeds, break-even and speed-up."""
    engine: str | None = None
    sweep: list[SweepRow] = []
    """Every setting at every concurrency."""
    by_prompt_length: dict[str, float] = {}
    mean_context: float | None = None
    notes: list[str] = []
    plain_tokens_per_second: float | None = None
    speculative_tokens_per_second: float | None = None
    plain_identical_share: float | None = None
    """Share of prompts whose speculative text is the plain one, token for token."""
    verdict: Verdict | None = None
    reasons: list[str] = []
    verify_passes: int = 0
    prompts: int = 0
    near_duplicates: int = 0
    """Prompts left out of the probe because they are close to a training prompt."""
    stages: dict[str, StageReport] = {}
    curves: list[dict[str, float]] = []
    """Loss and accuracy of each unroll step over training, and validation figures."""
    target: dict[str, str]
    drafter: str | None = None
    versions: dict[str, str]


def build_report(config: Config, run: RunFolder) -> Report:
    """Gather what the finished stages wrote. Raises OriginError when there is nothing to report."""
    stages = {name: origin for name in FOLDERS if name != "report" and (origin := run.finished(name))}
    if not stages:
        raise OriginError(f"{run.path}: expected a finished stage to report on, found none. Run `ray-eagle run` first.")
    made = next((o for o in stages.values() if o.target), None)  # preflight and mere arithmetic know no target
    report = Report(
        steps=config.probe.steps,
        confidence=config.probe.confidence,
        target={"path": made.target_path, **made.target} if made else {"path": config.target.path},
        versions=versions(),
        stages={
            name: StageReport(seconds=origin.seconds, bytes=origin.bytes, samples=origin.samples, tokens=origin.tokens)
            for name, origin in stages.items()
        },
    )
    if "breakeven" in stages:
        _add_breakeven(report, Breakeven.model_validate(run.of("breakeven").read_json("breakeven.json")), config)
    if "train" in stages:
        report.curves = run.of("train").read_json("training.json")["history"]
        report.stages["train"].bytes += run.folder(CHECKPOINTS).size()
    probed = "probe" if "probe" in stages else "probe-given"
    if probed in stages:
        _add_probe(report, Probe.model_validate(run.of(probed).read_json("probe.json")))
        report.drafter = run.of("train").path if probed == "probe" else config.drafter.path
    return report


def _add_breakeven(report: Report, found: Breakeven, config: Config) -> None:
    rows = found.measured.rows if found.measured else []
    first = rows[0].concurrency if rows else 1
    report.break_even_before_training = {
        row.steps: row.needed for row in rows if row.topk == 1 and row.concurrency == first
    }
    report.break_even = found.needed(config.probe.steps)
    payable = [row.can_pay for row in rows]
    if found.arithmetic:
        payable = [can_pay(found.arithmetic, config.probe.steps)]
    if payable and not any(payable):
        report.verdict = "not-worth-it"
        report.reasons = ["Break-even is steps + 1 or more at every number of draft steps: no drafter can pay here."]


def _add_probe(report: Report, found: Probe) -> None:
    served, predicted = found.served, found.predicted
    report.steps = served.steps
    report.acceptance_length = served.acceptance.acceptance_length
    report.acceptance_interval = served.acceptance.interval
    report.marginal_acceptance = served.acceptance.marginal
    report.histogram = served.acceptance.histogram
    report.by_category = {name: c.acceptance_length for name, c in served.acceptance.by_category.items()}
    if predicted:
        report.predicted_acceptance_length = predicted.acceptance_length
        report.predicted_interval = predicted.interval
        report.predicted_marginal = predicted.marginal
    if served.acceptance_without_repeats:
        report.acceptance_without_repeats = served.acceptance_without_repeats.acceptance_length
    report.repeated_8gram_share = served.repeated_8gram_share
    report.break_even = served.break_even
    report.break_even_interval = served.speed.break_even_interval
    report.speedup = served.speedup
    report.speedup_interval = served.speedup_interval
    report.concurrency = served.concurrency
    report.engine = served.engine or None
    report.sweep = served.sweep
    report.by_prompt_length = {name: c.acceptance_length for name, c in served.by_prompt_length.items()}
    report.mean_context = served.mean_context or None
    report.notes = served.notes
    report.plain_tokens_per_second = served.speed.plain_tokens_per_second
    report.speculative_tokens_per_second = served.speed.speculative_tokens_per_second
    report.plain_identical_share = served.plain_identical_share
    report.verdict = served.verdict
    report.reasons = served.reasons
    report.verify_passes = served.acceptance.verify_passes
    report.prompts = served.acceptance.prompts
    report.near_duplicates = found.near_duplicates


def to_json(report: Report) -> dict[str, Any]:
    return report.model_dump(mode="json")
