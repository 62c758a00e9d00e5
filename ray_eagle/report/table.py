"""The report as a table that a person understands."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ray_eagle.hidden_states.forecast import Forecast
from ray_eagle.preflight.estimate import human_bytes
from ray_eagle.probing.acceptance import Acceptance
from ray_eagle.report.model import Report

COLOURS = {"serve": "green", "fine-tune": "yellow", "not-worth-it": "red", "broken": "red"}
DASH = "-"


def render(report: Report) -> Group:
    """Result, seconds and bytes by stage, and the verdict."""
    sweep = [_sweep(report)] if len(report.sweep) > 1 else []
    return Group(_result(report), *sweep, _stages(report), _verdict(report))


def render_forecast(found: Forecast) -> Table:
    """What extraction will take."""
    table = Table(title="Extraction with these settings", title_justify="left")
    table.add_column("figure")
    table.add_column("forecast", justify="right")
    how = "assumed, no conversations yet" if found.assumed else "from the conversations"
    table.add_row(f"samples ({how})", f"{found.samples:,}")
    table.add_row("tokens / supervised", f"{found.tokens:,} / {found.supervised_tokens:,}")
    table.add_row(f"hidden states on disk, {found.state_dtype}", human_bytes(found.bytes))
    table.add_row("  free there", human_bytes(found.free_bytes) if found.free_bytes is not None else "not known")
    stages = f", {found.stages} stages each" if found.stages > 1 else ""
    table.add_row("actors", f"{found.actors}{stages}")
    if found.seconds is not None and found.tokens_per_second and found.memory_bytes:
        table.add_section()
        table.add_row(f"time, on {found.device}", human_seconds(found.seconds))
        table.add_row("  of it until the first states", human_seconds(found.start_seconds or 0))
        table.add_row("tokens/s, all actors", f"{found.tokens_per_second:,.0f}")
        table.add_row("bytes/s written", f"{human_bytes(found.bytes_per_second or 0)}/s")
        table.add_row("memory of one actor at most", human_bytes(found.memory_bytes))
        table.add_row("measured over", f"{found.calibrated_tokens:,} tokens")
    return table


def human_seconds(seconds: float) -> str:
    """`2 h 5 min`, `3 min 20 s` or `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def _result(report: Report) -> Table:
    table = Table(title=f"Drafter on held-out prompts, {report.steps} draft steps", title_justify="left")
    table.add_column("figure")
    table.add_column("served", justify="right")
    table.add_column("predicted from states", justify="right")
    table.add_row("acceptance length", _number(report.acceptance_length), _number(report.predicted_acceptance_length))
    table.add_row(
        f"  {100 * report.confidence:g} % interval",
        _interval(report.acceptance_interval),
        _interval(report.predicted_interval),
    )
    for position in range(len(report.marginal_acceptance)):
        predicted = report.predicted_marginal[position] if report.predicted_marginal else None
        table.add_row(
            f"  at least {position + 1} draft{'s' if position else ''} accepted",
            _share(report.marginal_acceptance[position]),
            _share(predicted),
        )
    table.add_row("  without repeated 8-grams", _number(report.acceptance_without_repeats), "")
    table.add_row("repeated 8-grams in the answers", _share(report.repeated_8gram_share), "")
    table.add_row("prompts / verify passes", f"{report.prompts} / {report.verify_passes}", "")
    table.add_section()
    table.add_row("break-even (needed to be faster)", _number(report.break_even), "")
    if report.break_even_before_training:
        before = ", ".join(f"{steps}: {needed:.2f}" for steps, needed in report.break_even_before_training.items())
        table.add_row("  before training, by draft steps", before, "")
    table.add_row("speed-up over plain decoding", f"{report.speedup:.2f}x" if report.speedup else DASH, "")
    if report.plain_tokens_per_second and report.speculative_tokens_per_second:
        speeds = f"{report.plain_tokens_per_second:.1f} / {report.speculative_tokens_per_second:.1f}"
        table.add_row("  tokens/s, plain / speculative", speeds, "")
    table.add_row("answers identical to plain decoding", _share(report.plain_identical_share), "")
    return table


def _sweep(report: Report) -> Table:
    table = Table(title="Every setting measured (* fastest at its concurrency)", title_justify="left")
    for column in ("steps", "topk", "tokens", "at once", "acceptance length", "break-even", "speed-up", "tokens/s"):
        table.add_column(column, justify="right")
    for row in report.sweep:
        table.add_row(
            str(row.steps),
            str(row.topk),
            str(row.draft_tokens),
            str(row.concurrency),
            f"{row.acceptance_length:.2f} [{row.interval[0]:.2f}, {row.interval[1]:.2f}]",
            f"{row.break_even:.2f}",
            f"{row.speedup:.2f}x{' *' if row.best else ''}",
            f"{row.plain_tokens_per_second:.0f} -> {row.speculative_tokens_per_second:.0f}",
        )
    return table


def _stages(report: Report) -> Table:
    table = Table(title="Stages", title_justify="left")
    table.add_column("stage")
    for column in ("seconds", "samples", "tokens", "on disk"):
        table.add_column(column, justify="right")
    for name, stage in report.stages.items():
        table.add_row(
            name,
            f"{stage.seconds:.0f}",
            f"{stage.samples:,}" if stage.samples else DASH,
            f"{stage.tokens:,}" if stage.tokens else DASH,
            human_bytes(stage.bytes) if stage.bytes else DASH,
        )
    table.add_section()
    total = sum(stage.bytes for stage in report.stages.values())
    table.add_row("all", f"{sum(s.seconds for s in report.stages.values()):.0f}", "", "", human_bytes(total))
    return table


def _verdict(report: Report) -> Text:
    text = Text()
    text.append("Verdict: ", style="bold")
    text.append(report.verdict or "none yet", style=f"bold {COLOURS.get(report.verdict or '', 'white')}")
    for reason in [*report.reasons, *report.notes]:
        text.append(f"\n  {reason}")
    if report.drafter:
        text.append(f"\n  Drafter: {report.drafter}")
    return text


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"


def _interval(value: tuple[float, float] | None) -> str:
    return DASH if value is None else f"{value[0]:.3f} to {value[1]:.3f}"


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def prediction_line(found: Acceptance) -> str:
    """What the walk over captured states found, in one sentence."""
    low, high = found.interval
    marginal = ", ".join(f"{p:.1%}" for p in found.marginal)
    return (
        f"predicted acceptance length {found.acceptance_length:.3f} [{low:.3f}, {high:.3f}] over {found.verify_passes} "
        f"passes of {found.prompts} held-out prompts; at least 1, 2, ... drafts accepted: {marginal}"
    )
