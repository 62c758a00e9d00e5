"""Measure several settings at several concurrencies, on an engine that restarts to change how it drafts.

Each setting is one start of the server: all prompts at the first concurrency, some at the others. The baseline, which is
also the text to compare with, comes from a server without speculation: in turns of a few prompts where the engine holds both
ready, so that a machine whose speed drifts slows both alike; else from one more start at the end. What a measurement would
silently get wrong is refused: simulated acceptance, a server that restarted in between, fewer requests at once than asked, requests
of others.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from ray_eagle.errors import InputError
from ray_eagle.probing.acceptance import acceptance
from ray_eagle.probing.breakeven import speedup
from ray_eagle.probing.differences import differences_from, faults_of, plain_gaps, unchecked_notes
from ray_eagle.probing.phase import BatchClient, Phase, Replies, as_found, batches, untimed_notes
from ray_eagle.probing.probe import Client, Predict, Progress, run_breakeven, run_probe
from ray_eagle.probing.reports import (
    RANDOM_NOTE,
    Bootstrap,
    BreakevenReport,
    BreakevenRow,
    Difference,
    ProbePrompt,
    ProbeReport,
    SoFar,
    SweepRow,
    breakeven_row,
    build_report,
    context_notes,
    evenly,
    mean_context,
    timing,
)
from ray_eagle.probing.speed import pool, speedup_interval
from ray_eagle.serving.engine import Speculation
from ray_eagle.serving.generation import complete_passes
from ray_eagle.serving.messages import GenerateReply

DRIFT = (
    "Plain and speculative decoding were timed one after the other, on servers that started apart: a machine whose speed drifts "
    "tilts break-even. Where two copies of the target fit, serve.side_by_side times them in turns."
)
ROUND = 8
"""Prompts, at least, that one side decodes before it is the other's turn: a second or so."""


class ProbeClient(Client, BatchClient, Protocol):
    """Either way."""


def probe_with(
    client: ProbeClient,
    prompts: Sequence[ProbePrompt],
    *,
    engine: str,
    settings: Sequence[Speculation],
    concurrencies: Sequence[int],
    temperature: float,
    outlived: bool = False,
    **options: Any,
) -> ProbeReport:
    """The report of the best setting, by `run_probe` where one reference engine decodes both ways in turn.

    `outlived`: the server goes on after the probe, so it is left drafting as it was found, whatever happens.
    """
    first = settings[0]
    chain = first.topk == 1 and first.draft_tokens == first.steps + 1
    one_by_one = chain and len(settings) == 1 and list(concurrencies) == [1] and not temperature

    def decode_plainly(**request: Any) -> list[GenerateReply]:
        client.configure(None)
        return client.decode(**request)

    with as_found(client) if outlived else nullcontext():
        if engine == "reference" and one_by_one:
            report = run_probe(client, prompts, steps=first.steps, decode_plainly=decode_plainly, **options)
            return report.model_copy(update={"engine": "reference"})
        return run_sweep(
            client, prompts, settings=settings, concurrencies=concurrencies, temperature=temperature, **options
        )


def breakeven_with(
    client: ProbeClient,
    prompts: Sequence[ProbePrompt],
    *,
    engine: str,
    settings: Sequence[Speculation],
    concurrencies: Sequence[int],
    **options: Any,
) -> BreakevenReport:
    """R of each setting at each concurrency."""
    if engine == "reference":
        return run_breakeven(client, prompts, [setting.steps for setting in settings], **options)
    return run_breakeven_sweep(client, prompts, settings=settings, concurrencies=concurrencies, **options)


def run_sweep(
    client: BatchClient,
    prompts: Sequence[ProbePrompt],
    *,
    settings: Sequence[Speculation],
    concurrencies: Sequence[int],
    temperature: float = 0.0,
    max_new_tokens: int,
    plain_prompts: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    progress: Progress = lambda done, total, note: None,
    predict: Predict = lambda steps: None,
) -> ProbeReport:
    """Measure every setting and report the best one at the first concurrency.

    Raises InputError without prompts or complete passes, ServingError when the figures would not mean what they say, and
    what the client raises.
    """
    _need(prompts, settings, concurrencies)
    if any(setting.simulated for setting in settings):
        raise InputError(
            "probe: expected settings that draft in earnest, found simulated acceptance. Leave `simulated` out."
        )
    bootstrap = Bootstrap(confidence, resamples, seed)
    settings, first = list(dict.fromkeys(settings)), concurrencies[0]
    both_ways = {c: evenly(len(prompts), _enough(plain_prompts, c)) for c in concurrencies}
    plan = {c: list(range(len(prompts))) if c == first else both_ways[c] for c in concurrencies}
    request = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    made = _decode(client, prompts, settings, plan, both_ways, request, progress)
    speculative, plain, plainly = made.speculative, made.plain, made.plainly
    differing: dict[Speculation, list[Difference]] = {setting: [] for setting in settings}
    if not temperature:
        pairs = {setting: (speculative[setting, first], plain[setting, first]) for setting in settings}
        gaps = plain_gaps(plainly.ask, prompts, list(pairs.values()))
        for setting, (drafted, reference) in pairs.items():
            differing[setting] = differences_from(prompts, _in_order(drafted, len(prompts)), reference, gaps)
    plainly.finish()

    rows = [
        _row(setting, c, speculative[setting, c], plain[setting, c], bootstrap)
        for setting in settings
        for c in concurrencies
    ]
    rows = [row.model_copy(update={"best": row.speedup == _fastest(rows, row.concurrency)}) for row in rows]
    best = settings[max(range(len(settings)), key=lambda i: rows[i * len(concurrencies)].speedup)]
    predicted = predict(best.steps) if best.topk == 1 and not temperature else None
    told = made.phases[settings.index(best)].facts
    report = build_report(
        prompts,
        _in_order(speculative[best, first], len(prompts)),
        plain[best, first],
        differing[best],
        steps=best.steps,
        max_new_tokens=max_new_tokens,
        bootstrap=bootstrap,
        predicted=(predicted.acceptance_length, predicted.interval) if predicted else None,
        flags=told.flags,
        faults=faults_of(differing),
        greedy=not temperature,
    )
    decoded = {
        "topk": best.topk,
        "draft_tokens": best.draft_tokens,
        "concurrency": first,
        "temperature": temperature,
        "engine": f"{told.name} {told.version}".strip(),
        "sweep": rows,
        "notes": [*report.notes, *made.notes(), *_best_notes(rows), *unchecked_notes(differing)],
    }
    return report.model_copy(update=decoded)


def run_breakeven_sweep(
    client: BatchClient,
    prompts: Sequence[ProbePrompt],
    *,
    settings: Sequence[Speculation],
    concurrencies: Sequence[int],
    max_new_tokens: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    progress: Progress = lambda done, total, note: None,
) -> BreakevenReport:
    """R of each setting at each concurrency, all prompts each time (at least two batches). Raises as `run_sweep`."""
    _need(prompts, settings, concurrencies)
    settings = list(dict.fromkeys(settings))
    numbers = list(range(len(prompts)))
    request = {"max_new_tokens": max_new_tokens, "past_end": True}  # so that a batch stays full
    plan = dict.fromkeys(concurrencies, numbers)
    made = _decode(client, prompts, settings, plan, plan, request, progress)
    made.plainly.finish()
    rows: list[BreakevenRow] = []
    for (setting, c), replies in made.speculative.items():
        timings = [t for i, plain in made.plain[setting, c].items() if (t := timing(replies[i], plain))]
        rows.append(
            breakeven_row(
                pool(timings, confidence=confidence, resamples=resamples, seed=seed),
                setting.steps,
                context=list(replies.values()),
                topk=setting.topk,
                draft_tokens=setting.draft_tokens,
                concurrency=c,
                simulated=setting.simulated,
            )
        )
    return BreakevenReport(
        max_new_tokens=max_new_tokens,
        prompts=len(prompts),
        rows=rows,
        notes=[
            *context_notes(float(np.mean([row.mean_context for row in rows]))),
            _yield_note(settings),
            *made.notes(),
        ],
    )


def _yield_note(settings: Sequence[Speculation]) -> str:
    """How much was accepted while cycles were timed."""
    if any(setting.simulated is None for setting in settings):
        return RANDOM_NOTE
    yields = " or ".join(f"{tokens:g}" for tokens in sorted({setting.simulated or 0 for setting in settings}))
    return (
        f"Cycles were timed while each yielded {yields} tokens, which the server pretends: it takes time for each accepted "
        "token, so R grows a little with the acceptance length (breakeven.acceptance_length). The text was not the target's."
    )


@dataclass
class _Decoded:
    """Answers of each setting at each concurrency, beside plain ones to some of the prompts."""

    speculative: dict[tuple[Speculation, int], Replies] = field(default_factory=dict)
    plain: dict[tuple[Speculation, int], Replies] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    """Of the settings."""
    plainly: Phase = field(init=False)
    """The baseline's, which still decodes."""
    in_turns: bool = False

    def notes(self) -> list[str]:
        """What the times do not rest on, and what may tilt them."""
        return [*([] if self.in_turns else [DRIFT]), *untimed_notes([*self.phases, self.plainly])]


def _decode(
    client: BatchClient,
    prompts: Sequence[ProbePrompt],
    settings: Sequence[Speculation],
    plan: dict[int, list[int]],
    both_ways: dict[int, list[int]],
    request: dict[str, Any],
    progress: Progress,
) -> _Decoded:
    """`plan`: prompts that each setting answers at each concurrency. `both_ways`: those of them that are answered plainly too."""
    made = _Decoded(in_turns=client.engine().side_by_side)
    again = sum(map(len, both_ways.values())) * (len(settings) if made.in_turns else 1)
    total = len(settings) * sum(map(len, plan.values())) + again
    tick = _Ticker(progress, total)
    for setting in settings:
        phase = Phase(client, setting, max(plan))
        made.phases.append(phase)
        if made.in_turns and setting == settings[0]:
            made.plainly = Phase(client, None, max(plan))
        for c, numbers in plan.items():
            speculative = made.speculative[setting, c] = {}
            plain = made.plain[setting, c] = {}
            drafted = tick if setting.simulated else partial(tick, so_far=SoFar(setting.steps))
            shared = both_ways[c] if made.in_turns else []
            for some in batches(shared, -(-ROUND // c) * c):
                phase.resume()
                speculative |= phase.decode(prompts, some, c, request, drafted)
                made.plainly.resume()
                plain |= made.plainly.decode(prompts, some, c, request, tick)
            if shared:
                phase.resume()
            speculative |= phase.decode(prompts, [n for n in numbers if n not in plain], c, request, drafted)
        phase.finish()
    if made.in_turns:
        made.plainly.resume()
    else:
        made.plainly = Phase(client, None, max(plan))
        once = {c: made.plainly.decode(prompts, both_ways[c], c, request, tick) for c in plan}
        made.plain = {(setting, c): once[c] for setting in settings for c in plan}
    return made


def needed_sentence(report: BreakevenReport, steps: int) -> str:
    """`with 3 steps, at concurrency 1 you need 1.90 accepted, at 16 you need 2.70`."""
    rows = [row for row in report.rows if row.steps == steps and row.topk == 1] or report.rows
    parts = [f"at {'concurrency ' if not i else ''}{r.concurrency} you need {r.needed:.2f}" for i, r in enumerate(rows)]
    parts[0] += " accepted"
    return f"with {rows[0].steps} draft steps, " + ", ".join(parts)


class _Ticker:
    """Counts prompts over all phases."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, replies: Sequence[GenerateReply], so_far: SoFar | None = None) -> None:
        """`so_far`: of the setting that drafted them; None for answers that say nothing about a drafter."""
        for reply in replies:
            self._done += 1
            self._progress(self._done, self._total, so_far.add(reply) if so_far else "")


def _row(setting: Speculation, c: int, replies: Replies, plain: Replies, bootstrap: Bootstrap) -> SweepRow:
    accepted = [
        [p.accepted for p in complete_passes(r.generation, r.prompt_length, setting.steps)] for r in replies.values()
    ]
    whole = acceptance(accepted, ["all"] * len(accepted), steps=setting.steps, **vars(bootstrap))
    timings = [timing(reply, plain.get(i)) for i, reply in replies.items()]
    timed = [t for t in timings if t]
    speed = pool(timed, **vars(bootstrap))
    made = np.array([sum(js) + len(js) for js in accepted], dtype=np.float64)
    passes = np.array([len(js) for js in accepted], dtype=np.float64)
    return SweepRow(
        steps=setting.steps,
        topk=setting.topk,
        draft_tokens=setting.draft_tokens,
        concurrency=c,
        acceptance_length=whole.acceptance_length,
        interval=whole.interval,
        verify_passes=whole.verify_passes,
        break_even=speed.break_even,
        break_even_interval=speed.break_even_interval,
        speedup=speedup(whole.acceptance_length, speed.break_even),
        speedup_interval=speedup_interval(made, passes, timings, **vars(bootstrap)),
        plain_tokens_per_second=c * speed.plain_tokens_per_second,
        speculative_tokens_per_second=c * whole.acceptance_length / speed.cycle_seconds,
        prompts_timed=len(timed),
        mean_context=mean_context(list(replies.values())),
        best=False,
    )


def _fastest(rows: Sequence[SweepRow], concurrency: int) -> float:
    return max(row.speedup for row in rows if row.concurrency == concurrency)


def _best_notes(rows: Sequence[SweepRow]) -> list[str]:
    """The best setting at each concurrency, in words."""
    notes = []
    for row in rows:
        if row.best:
            name = Speculation(steps=row.steps, topk=row.topk, draft_tokens=row.draft_tokens).name
            low, high = row.speedup_interval
            notes.append(
                f"At concurrency {row.concurrency} the best of these settings is {name}: {row.speedup:.2f} times "
                f"[{low:.2f}, {high:.2f}] the speed of plain decoding; break-even {row.break_even:.2f}."
            )
    return notes


def _need(prompts: Sequence[ProbePrompt], settings: Sequence[Speculation], concurrencies: Sequence[int]) -> None:
    if not prompts:
        raise InputError("probe: expected at least one prompt, found none. Check probe.prompts and probe.limit.")
    if not settings:
        raise InputError("break-even: expected at least one number of draft steps, found none. Set breakeven.steps.")
    if len(prompts) < max(concurrencies):
        raise InputError(
            f"probe: expected at least {max(concurrencies)} prompts to decode so many at once, found {len(prompts)}. Lower the "
            "concurrencies, or name more prompts (probe.prompts, probe.limit)."
        )


def _enough(wanted: int, concurrency: int) -> int:
    """At least two batches, and whole ones: the last, half-full one could not be timed."""
    return -(-max(wanted, 2 * concurrency) // concurrency) * concurrency


def _in_order(replies: Replies, count: int) -> list[GenerateReply]:
    return [replies[number] for number in range(count)]
