"""Measure a served drafter: acceptance, speed against plain decoding of the same prompts, and the verdict.

`run_breakeven` measures R alone, for several numbers of draft steps: R hardly depends on how good the drafter is, so a random
one of the right shape tells, before any training, what a trained one must reach.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from ray_eagle.errors import InputError
from ray_eagle.probing.acceptance import Acceptance
from ray_eagle.probing.differences import differences_from, faults_of, plain_gaps, unchecked_notes
from ray_eagle.probing.phase import WARM_UP_TOKENS
from ray_eagle.probing.reports import (
    RANDOM_NOTE,
    Bootstrap,
    BreakevenReport,
    ProbePrompt,
    ProbeReport,
    SoFar,
    breakeven_row,
    build_report,
    context_notes,
    evenly,
    timing,
)
from ray_eagle.probing.speed import Timing, pool
from ray_eagle.serving.engine import Speculation
from ray_eagle.serving.messages import GenerateReply

Progress = Callable[[int, int, str], None]
"""Called with (prompts done, prompts in all, note)."""
Predict = Callable[[int], Acceptance | None]
"""Acceptance that a walk over captured states predicts at a number of draft steps."""


class Client(Protocol):
    """What a probe asks of a server that can decode both ways, one prompt at a time."""

    def generate(self, *, input_ids: list[int], max_new_tokens: int, steps: int, plain: bool) -> GenerateReply:
        """Greedy answer, speculative or plain."""


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
    predict: Predict = lambda steps: None,
    decode_plainly: Callable[..., list[GenerateReply]] | None = None,
) -> ProbeReport:
    """Decode every prompt speculatively, `plain_prompts` of them (evenly spread) plainly as well, and judge.

    The first prompt also warms up, uncounted. Raises InputError without prompts or complete passes, and what the client
    raises. `predict`: what a walk over captured states gives at a number of steps, where there are some. `decode_plainly`:
    `decode` of a client that speculates not, to see how close choices were where text differs.
    """
    _warm_up(client, prompts, max_new_tokens, (steps,))
    both_ways = set(evenly(len(prompts), plain_prompts))
    replies: list[GenerateReply] = []
    plain: dict[int, GenerateReply] = {}
    so_far = SoFar(steps)
    for number, prompt in enumerate(prompts):
        reply = client.generate(input_ids=prompt.input_ids, max_new_tokens=max_new_tokens, steps=steps, plain=False)
        replies.append(reply)
        if number in both_ways:
            plain[number] = client.generate(
                input_ids=prompt.input_ids, max_new_tokens=max_new_tokens, steps=steps, plain=True
            )
        progress(number + 1, len(prompts), so_far.add(reply))
    predicted = predict(steps)
    again = plain_gaps(decode_plainly, prompts, [(dict(enumerate(replies)), plain)]) if decode_plainly else {}
    differing = {Speculation(steps=steps): differences_from(prompts, replies, plain, again)}
    report = build_report(
        prompts,
        replies,
        plain,
        *differing.values(),
        steps=steps,
        max_new_tokens=max_new_tokens,
        bootstrap=Bootstrap(confidence, resamples, seed),
        predicted=(predicted.acceptance_length, predicted.interval) if predicted else None,
        faults=faults_of(differing),
    )
    return report.model_copy(update={"notes": [*report.notes, *unchecked_notes(differing)]})


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
    contexts: dict[int, list[GenerateReply]] = {count: [] for count in steps}
    for number, prompt in enumerate(prompts):
        plain = client.generate(input_ids=prompt.input_ids, max_new_tokens=max_new_tokens, steps=1, plain=True)
        for count in timings:
            reply = client.generate(input_ids=prompt.input_ids, max_new_tokens=max_new_tokens, steps=count, plain=False)
            if both := timing(reply, plain):
                timings[count].append(both)
            contexts[count].append(reply)
        progress(number + 1, len(prompts), "")
    rows = [
        breakeven_row(
            pool(measured, confidence=confidence, resamples=resamples, seed=seed), count, context=contexts[count]
        )
        for count, measured in timings.items()
    ]
    notes = [*context_notes(rows[0].mean_context), RANDOM_NOTE]
    return BreakevenReport(max_new_tokens=max_new_tokens, prompts=len(prompts), rows=rows, notes=notes)


def _warm_up(client: Client, prompts: Sequence[ProbePrompt], max_new_tokens: int, steps: Sequence[int]) -> None:
    if not prompts:
        raise InputError("probe: expected at least one prompt, found none. Check probe.prompts and probe.limit.")
    ids, tokens = prompts[0].input_ids, min(WARM_UP_TOKENS, max_new_tokens)
    client.generate(input_ids=ids, max_new_tokens=tokens, steps=1, plain=True)
    for count in steps:
        client.generate(input_ids=ids, max_new_tokens=tokens, steps=count, plain=False)
