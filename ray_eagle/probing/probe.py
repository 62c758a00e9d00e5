"""Measure a served drafter: acceptance, speed against plain decoding of the same prompts, and the verdict.

`run_breakeven` measures R alone, for several numbers of draft steps: R does not depend on how good the drafter is, so a
random one of the right shape tells, before any training, what a trained one must reach.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from ray_eagle.errors import InputError
from ray_eagle.probing.acceptance import Acceptance, acceptance
from ray_eagle.probing.breakeven import can_pay, speedup
from ray_eagle.probing.repeats import passes_without_repeats, repeated_ngram_share
from ray_eagle.probing.speed import Speed, Timing, pool
from ray_eagle.probing.verdict import VerdictName, verdict
from ray_eagle.serving.generation import complete_passes
from ray_eagle.serving.messages import GenerateReply

Progress = Callable[[int, int, str], None]
"""Called with (prompts done, prompts in all, note)."""
WARM_UP_TOKENS = 8


class Client(Protocol):
    """What a probe asks of a server."""

    def generate(self, *, input_ids: list[int], max_new_tokens: int, steps: int, plain: bool) -> GenerateReply:
        """Greedy answer, speculative or plain."""


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


class ProbeReport(Report):
    """Is this drafter worth serving here?"""

    steps: int
    max_new_tokens: int
    prompts: int
    acceptance: Acceptance
    """Over complete passes: the figure to quote."""
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
    plain_identical_share: float
    differences: list[Difference]
    rows: list[PromptRow]


class BreakevenRow(Report):
    """R at one number of draft steps."""

    steps: int
    needed: float
    """The acceptance length that a drafter must exceed: R."""
    can_pay: bool
    """Whether a perfect drafter would (R < steps + 1)."""
    speed: Speed


class BreakevenReport(Report):
    """What a drafter must reach to be worth serving here."""

    max_new_tokens: int
    prompts: int
    rows: list[BreakevenRow]


def run_probe(
    client: Client,
    prompts: Sequence[ProbePrompt],
    *,
    steps: int,
    max_new_tokens: int,
    plain_prompts: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    progress: Progress = lambda done, total, note: None,
) -> ProbeReport:
    """Decode every prompt speculatively, `plain_prompts` of them (evenly spread) plainly as well, and judge.

    The first prompt also warms up, uncounted. Raises InputError without prompts or complete passes, and what the client
    raises.
    """
    _warm_up(client, prompts, max_new_tokens, (steps,))
    both_ways = set(np.linspace(0, len(prompts) - 1, min(plain_prompts, len(prompts))).round().astype(int).tolist())
    rows: list[PromptRow] = []
    timings: list[Timing] = []
    differences: list[Difference] = []
    cycles, accepted_so_far = 0, 0
    for number, prompt in enumerate(prompts):
        reply = client.generate(input_ids=prompt.input_ids, max_new_tokens=max_new_tokens, steps=steps, plain=False)
        rows.append(_row(prompt, reply, steps))
        cycles += len(reply.passes)
        if number in both_ways:
            plain = client.generate(input_ids=prompt.input_ids, max_new_tokens=max_new_tokens, steps=steps, plain=True)
            timings.append(_timing(reply, plain))
            if plain.tokens != reply.tokens:
                differences.append(Difference(id=prompt.id, index=_first_difference(plain.tokens, reply.tokens)))
        accepted_so_far += sum(p.accepted for p in reply.passes)
        note = f"acceptance length {1 + accepted_so_far / cycles:.2f}" if cycles else "no verify pass yet"
        progress(number + 1, len(prompts), note)

    categories = [row.category for row in rows]

    def pooled(accepted: list[list[int]]) -> Acceptance:
        return acceptance(accepted, categories, steps=steps, confidence=confidence, resamples=resamples, seed=seed)

    whole = pooled([row.accepted for row in rows])
    fresh = [passes_without_repeats(row.tokens, row.prompt_length, row.starts, row.accepted) for row in rows]
    speed = pool(timings, confidence=confidence, resamples=resamples, seed=seed)
    name, reasons = verdict(whole.interval, whole.acceptance_length, speed.break_even, steps)
    return ProbeReport(
        steps=steps,
        max_new_tokens=max_new_tokens,
        prompts=len(rows),
        acceptance=whole,
        acceptance_all_passes=pooled([row.accepted + row.cut for row in rows]),
        acceptance_without_repeats=pooled(fresh) if any(fresh) else None,
        repeated_8gram_share=repeated_ngram_share([row.tokens for row in rows]),
        speed=speed,
        break_even=speed.break_even,
        speedup=speedup(whole.acceptance_length, speed.break_even),
        verdict=name,
        reasons=reasons,
        plain_identical_share=1 - len(differences) / len(timings),
        differences=differences,
        rows=rows,
    )


def run_breakeven(
    client: Client,
    prompts: Sequence[ProbePrompt],
    steps: Sequence[int],
    *,
    max_new_tokens: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    progress: Progress = lambda done, total, note: None,
) -> BreakevenReport:
    """R for each number of draft steps: every prompt plainly, then at each setting, so that all see the same lengths.

    Raises InputError without prompts or steps, or when no answer has a second token, and what the client raises.
    """
    if not steps:
        raise InputError("break-even: expected at least one number of draft steps, found none. Set breakeven.steps.")
    _warm_up(client, prompts, max_new_tokens, steps)
    timings: dict[int, list[Timing]] = {count: [] for count in steps}
    for number, prompt in enumerate(prompts):
        plain = client.generate(input_ids=prompt.input_ids, max_new_tokens=max_new_tokens, steps=1, plain=True)
        for count in timings:
            reply = client.generate(input_ids=prompt.input_ids, max_new_tokens=max_new_tokens, steps=count, plain=False)
            timings[count].append(_timing(reply, plain))
        progress(number + 1, len(prompts), "")
    rows = []
    for count, measured in timings.items():
        speed = pool(measured, confidence=confidence, resamples=resamples, seed=seed)
        rows.append(
            BreakevenRow(steps=count, needed=speed.break_even, can_pay=can_pay(speed.break_even, count), speed=speed)
        )
    return BreakevenReport(max_new_tokens=max_new_tokens, prompts=len(prompts), rows=rows)


def _warm_up(client: Client, prompts: Sequence[ProbePrompt], max_new_tokens: int, steps: Sequence[int]) -> None:
    if not prompts:
        raise InputError("probe: expected at least one prompt, found none. Check probe.prompts and probe.limit.")
    ids, tokens = prompts[0].input_ids, min(WARM_UP_TOKENS, max_new_tokens)
    client.generate(input_ids=ids, max_new_tokens=tokens, steps=1, plain=True)
    for count in steps:
        client.generate(input_ids=ids, max_new_tokens=tokens, steps=count, plain=False)


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


def _timing(speculative: GenerateReply, plain: GenerateReply) -> Timing:
    return Timing(
        cycle_seconds=speculative.step_seconds * len(speculative.passes),
        cycles=len(speculative.passes),
        speculative_tokens=speculative.decode_tokens,
        plain_seconds=plain.step_seconds * plain.decode_tokens,
        plain_tokens=plain.decode_tokens,
    )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first token in which two answers differ; the shorter length when one begins the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
