"""What a probe and a break-even measurement report, and how it is made from the answers."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from ray_eagle.probing.acceptance import Acceptance, CategoryAcceptance, acceptance
from ray_eagle.probing.breakeven import can_pay, speedup
from ray_eagle.probing.repeats import passes_without_repeats, repeated_ngram_share
from ray_eagle.probing.speed import Speed, Timing, pool, speedup_interval
from ray_eagle.probing.verdict import VerdictName, verdict
from ray_eagle.serving.generation import complete_passes
from ray_eagle.serving.messages import GenerateReply

BUCKETS = (128, 512, 2048)


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made."""

    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 0


class Report(BaseModel):
    model_config = ConfigDict(frozen=True)


class ProbePrompt(Report):
    """One prompt, in the target's tokens."""

    id: str
    category: str
    input_ids: list[int]


class PromptRow(Report):
    """What one prompt gave: enough to compare pass by pass with a walk over captured states."""

    id: str
    category: str
    prompt_length: int
    tokens: list[int]
    starts: list[int]
    """Index t of each complete verify pass, in prompt + answer."""
    accepted: list[int]
    """Accepted drafts of each complete pass."""
    cut: list[int]
    """Accepted drafts of the passes that reached beyond the answer's end."""
    decode_seconds: float
    decode_tokens: int


class Difference(Report):
    """A prompt whose speculative answer is not its plain one (rounding, except in float32), and where they part."""

    id: str
    index: int
    gap: float | None = None
    """How far apart the plain model's two best tokens were there, in log-probability; None where that is not known."""
    past_the_end: bool = False
    """One answer begins the other: both are the same up to where one of them ends, which rounding never explains."""


class SweepRow(Report):
    """One setting at one concurrency."""

    steps: int
    topk: int
    draft_tokens: int
    concurrency: int
    acceptance_length: float
    interval: tuple[float, float]
    verify_passes: int
    break_even: float
    break_even_interval: tuple[float, float]
    speedup: float
    speedup_interval: tuple[float, float]
    plain_tokens_per_second: float
    """Of all requests together."""
    speculative_tokens_per_second: float
    prompts_timed: int
    mean_context: float
    """Tokens before the one being decoded, on average: R moves with it."""
    best: bool
    """The fastest at this concurrency."""


class ProbeReport(Report):
    """Is this drafter worth serving here?"""

    steps: int
    max_new_tokens: int
    prompts: int
    acceptance: Acceptance
    """Over complete passes, and all of the answers in `unordered_prompts`: the figure to quote."""
    acceptance_all_passes: Acceptance
    """The cut pass at each answer's end included."""
    acceptance_without_repeats: Acceptance | None
    """Without passes that draft from inside a loop; None when nothing else is left."""
    repeated_8gram_share: float
    speed: Speed
    """Over the prompts decoded both ways, one right after the other."""
    break_even: float
    speedup: float
    """acceptance_length / break_even."""
    verdict: VerdictName
    reasons: list[str]
    plain_identical_share: float | None
    """Of the prompts decoded both ways; None when sampled."""
    differences: list[Difference]
    rows: list[PromptRow]
    topk: int = 1
    draft_tokens: int | None = None
    concurrency: int = 1
    temperature: float = 0.0
    speedup_interval: tuple[float, float] | None = None
    mean_context: float = 0.0
    """Tokens before the one being decoded, on average."""
    by_prompt_length: dict[str, CategoryAcceptance] = {}
    unordered_prompts: int = 0
    """Prompts whose passes are known by number only, since the server merged their chunks."""
    engine: str = ""
    """Name and version of the engine."""
    flags: list[str] = []
    """Flags of the server that decodes as measured here."""
    sweep: list[SweepRow] = []
    """Every setting at every concurrency; the figures above are those of the best one at the first concurrency."""
    notes: list[str] = []


class BreakevenRow(Report):
    """R at one number of draft steps."""

    steps: int
    needed: float
    """The acceptance length that a drafter must exceed: R."""
    can_pay: bool
    """Whether a perfect drafter would (R < steps + 1)."""
    speed: Speed
    topk: int = 1
    draft_tokens: int | None = None
    concurrency: int = 1
    mean_context: float = 0.0
    simulated: float | None = None
    """Tokens that each cycle yielded, because the server pretended; None: what the random drafter came to, about 1."""


class BreakevenReport(Report):
    """What a drafter must reach to be worth serving here."""

    max_new_tokens: int
    prompts: int
    rows: list[BreakevenRow]
    notes: list[str] = []


class Breakeven(BaseModel):
    """probes/breakeven/breakeven.json."""

    measured: BreakevenReport | None = None
    arithmetic: float | None = None
    """R from a given baseline and cycle time; nothing was served."""

    def needed(self, steps: int, concurrency: int | None = None) -> float | None:
        """R of a chain of so many draft steps, if it is known; at the first measured concurrency unless one is named."""
        if self.measured:
            rows = [row for row in self.measured.rows if row.steps == steps and row.topk == 1]
            return next((row.needed for row in rows if concurrency in (None, row.concurrency)), None)
        return self.arithmetic


class Probe(BaseModel):
    """probes/{given,trained}/probe.json."""

    served: ProbeReport
    predicted: Acceptance | None
    """The walk over captured held-out states; None where there are none."""
    near_duplicates: int
    """Prompts left out because they are close to a training prompt."""


def build_report(
    prompts: Sequence[ProbePrompt],
    replies: Sequence[GenerateReply],
    plain: dict[int, GenerateReply],
    differences: list[Difference],
    *,
    steps: int,
    max_new_tokens: int,
    bootstrap: Bootstrap,
    predicted: tuple[float, tuple[float, float]] | None = None,
    flags: Sequence[str] = (),
    faults: Sequence[str] = (),
    greedy: bool = True,
) -> ProbeReport:
    """The report of one setting: speculative answers to all prompts, plain ones to some (by number), and where they part.

    Raises InputError when there is no complete pass, or nothing that was timed both ways.
    """
    rows = [_row(prompt, reply, steps) for prompt, reply in zip(prompts, replies, strict=True)]
    categories = [row.category for row in rows]

    def pooled(accepted: list[list[int]], groups: list[str]) -> Acceptance:
        return acceptance(accepted, groups, steps=steps, **vars(bootstrap))

    whole = pooled([row.accepted for row in rows], categories)
    fresh = [passes_without_repeats(row.tokens, row.prompt_length, row.starts, row.accepted) for row in rows]
    timings = [timing(reply, plain.get(i)) for i, reply in enumerate(replies)]
    speed = pool([t for t in timings if t], **vars(bootstrap))
    gained = speedup_interval(
        np.array([sum(row.accepted) + len(row.accepted) for row in rows], dtype=np.float64),
        np.array([len(row.accepted) for row in rows], dtype=np.float64),
        timings,
        **vars(bootstrap),
    )
    name, reasons = verdict(
        whole.interval,
        whole.acceptance_length,
        speed.break_even,
        steps,
        speedup_interval=gained,
        predicted=predicted,
        flags=flags,
        faults=faults,
        unchecked=bool(differences) and all(d.gap is None for d in differences),
        passes=whole.verify_passes,
    )
    context = mean_context(replies)
    unordered = sum(any(p.start < 0 for p in reply.passes) for reply in replies)
    return ProbeReport(
        steps=steps,
        max_new_tokens=max_new_tokens,
        prompts=len(rows),
        acceptance=whole,
        acceptance_all_passes=pooled([row.accepted + row.cut for row in rows], categories),
        acceptance_without_repeats=pooled(fresh, categories) if any(fresh) else None,
        repeated_8gram_share=repeated_ngram_share([row.tokens for row in rows]),
        speed=speed,
        break_even=speed.break_even,
        speedup=speedup(whole.acceptance_length, speed.break_even),
        speedup_interval=gained,
        verdict=name,
        reasons=reasons,
        plain_identical_share=1 - len(differences) / len(plain) if greedy else None,
        differences=differences,
        rows=rows,
        draft_tokens=steps + 1,
        mean_context=context,
        by_prompt_length=pooled(
            [row.accepted for row in rows], [length_bucket(row.prompt_length) for row in rows]
        ).by_category,
        unordered_prompts=unordered,
        flags=list(flags),
        notes=[*context_notes(context), *_unordered_notes(unordered, len(rows))],
    )


class SoFar:
    """The acceptance length of the answers that are there, over the passes that `build_report` will count."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._accepted: list[int] = []

    def add(self, reply: GenerateReply) -> str:
        """With one more answer, in words."""
        complete = complete_passes(reply.generation, reply.prompt_length, self._steps)
        self._accepted += [p.accepted for p in complete]
        if not self._accepted:
            return "no complete verify pass yet"
        return f"acceptance length {1 + statistics.fmean(self._accepted):.2f}"


def breakeven_row(
    speed: Speed,
    steps: int,
    *,
    context: Sequence[GenerateReply],
    topk: int = 1,
    draft_tokens: int | None = None,
    concurrency: int = 1,
    simulated: float | None = None,
) -> BreakevenRow:
    """R of one setting, and whether a perfect drafter would reach it."""
    return BreakevenRow(
        steps=steps,
        needed=speed.break_even,
        can_pay=can_pay(speed.break_even, steps),
        speed=speed,
        topk=topk,
        draft_tokens=draft_tokens or steps + 1,
        concurrency=concurrency,
        mean_context=mean_context(context),
        simulated=simulated,
    )


def evenly(total: int, count: int) -> list[int]:
    """`count` of the numbers below `total` (all, when there are fewer), evenly spread, first and last among them."""
    return sorted(set(np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()))


def mean_context(replies: Sequence[GenerateReply]) -> float:
    """Tokens before the one being decoded, averaged over all tokens of the answers."""
    tokens = sum(len(reply.tokens) for reply in replies)
    before = sum(len(r.tokens) * (r.prompt_length + (len(r.tokens) - 1) / 2) for r in replies)
    return before / tokens if tokens else 0.0


def length_bucket(prompt_length: int) -> str:
    """`< 128`, `128-511`, `512-2047`, `>= 2048`."""
    if prompt_length < BUCKETS[0]:
        return f"< {BUCKETS[0]}"
    for low, high in itertools.pairwise(BUCKETS):
        if prompt_length < high:
            return f"{low}-{high - 1}"
    return f">= {BUCKETS[-1]}"


RANDOM_NOTE = (
    "Cycles were timed with a random drafter, of which next to nothing is accepted: the time that a server takes for each "
    "accepted token is not in it. A probe of a trained drafter measures that too."
)


def context_notes(context: float) -> list[str]:
    """What a break-even figure holds for."""
    return [
        f"Break-even was measured at a mean context of {context:.0f} tokens. It moves with the context's length and, on "
        "mixture-of-experts targets, with what is drafted (more experts are read for a varied draft)."
    ]


def _unordered_notes(unordered: int, prompts: int) -> list[str]:
    if not unordered:
        return []
    return [
        f"The server merged chunks of {unordered} of {prompts} answers, so the order of their passes is not known: the pass "
        "that the answer's end cuts is counted there as the others are."
    ]


def _row(prompt: ProbePrompt, reply: GenerateReply, steps: int) -> PromptRow:
    complete = complete_passes(reply.generation, reply.prompt_length, steps)
    return PromptRow(
        id=prompt.id,
        category=prompt.category,
        prompt_length=reply.prompt_length,
        tokens=reply.tokens,
        starts=[p.start for p in complete],
        accepted=[p.accepted for p in complete],
        cut=[p.accepted for p in reply.passes[len(complete) :]],
        decode_seconds=reply.decode_seconds,
        decode_tokens=reply.decode_tokens,
    )


def timing(speculative: GenerateReply, plain: GenerateReply | None) -> Timing | None:
    """Both ways of one prompt; None unless both were timed, so that R compares the same prompts."""
    if plain is None:
        return None
    cycles = len(speculative.passes) if speculative.step_seconds else 0
    steps = plain.decode_tokens if plain.step_seconds else 0
    if not cycles or not steps:
        return None
    return Timing(
        cycle_seconds=speculative.step_seconds * cycles,
        cycles=cycles,
        speculative_tokens=speculative.decode_tokens,
        plain_seconds=plain.step_seconds * steps,
        plain_tokens=steps,
    )
