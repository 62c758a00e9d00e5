"""Verify passes of an answer that a server streamed, and the time of one of them.

With a stream interval of 1 each chunk is one verify pass: its new tokens are the accepted drafts and the bonus. A server
under load merges chunks; then its own histogram says how many drafts the passes accepted, though not in which order.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ray_eagle.errors import ServingError
from ray_eagle.serving.generation import VerifyPass

BLOCK = 8
"""Passes averaged before the median: chunks arrive in bunches, and a single interval says little."""
NOTHING = (math.inf, -math.inf)
"""A window of time that holds no cycle."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer."""

    tokens: list[int]
    counts: list[int]
    """New tokens of each chunk; the first holds the prefill's token."""
    times: list[float]
    """Arrival of each chunk, in seconds on one clock."""
    started: float
    """When the request was sent."""
    stopped: bool
    """It ended by itself rather than by its length."""
    accepted: list[int] | None = None
    """Accepted drafts of the passes, sorted, as the server counted them; None where it did not say."""
    gaps: list[float] | None = None

    @property
    def pass_sizes(self) -> list[int]:
        """Tokens of each chunk without the prefill's; chunks that hold nothing else are left out."""
        return [count for count in [self.counts[0] - 1, *self.counts[1:]] if count]


def ended(answer: Answer, ends: Collection[int]) -> Answer:
    """The answer up to its first end-of-sequence token, where the chunk that reached the limit brought tokens after it.

    SGLang looks at the length first: an answer that reaches max_new_tokens in the pass that accepted its end keeps what
    follows. An end passed over in an earlier chunk stays: no engine may do that.
    """
    before = len(answer.tokens) - answer.counts[-1]
    at = next((i for i in range(before, len(answer.tokens)) if answer.tokens[i] in ends), None)
    if at is None or at + 1 == len(answer.tokens):
        return answer
    counts = [*answer.counts[:-1], at + 1 - before]
    gaps = answer.gaps and answer.gaps[: at + 1]
    return replace(answer, tokens=answer.tokens[: at + 1], counts=counts, stopped=True, gaps=gaps)


def verify_passes(answer: Answer, prompt_length: int, steps: int) -> list[VerifyPass]:
    """The passes of a speculative answer: in order with their starts, or unordered with start -1 when chunks were merged.

    The last pass may have accepted more than the answer holds. Raises ServingError when the server's counts contradict
    each other.
    """
    sizes, told = answer.pass_sizes, answer.accepted
    if told is not None and told and max(told) > steps:
        raise ServingError(
            f"server: expected at most {steps} accepted drafts a pass, found {max(told)}. It drafts other than it was told."
        )
    last = _last_accepted(sizes, told)
    if last is None:
        assert told is not None
        return [VerifyPass(-1, [], accepted, -1) for accepted in told]
    passes = []
    at = 1  # the first token is the prefill's
    for number, size in enumerate(sizes):
        accepted = size - 1 if number < len(sizes) - 1 else last
        ends = at + accepted < len(answer.tokens)
        bonus = answer.tokens[at + accepted] if ends else -1
        passes.append(VerifyPass(prompt_length + at - 2, answer.tokens[at : at + accepted], accepted, bonus))
        at += size
    return passes


def _last_accepted(sizes: list[int], told: list[int] | None) -> int | None:
    """Accepted drafts of the last pass, if each chunk was one pass; None if chunks were merged."""
    if not sizes:
        return 0 if not told else None
    if told is None:
        return sizes[-1] - 1
    if len(told) != len(sizes):
        return None
    rest = list(told)
    for size in sizes[:-1]:
        if size - 1 not in rest:
            return None
        rest.remove(size - 1)
    return rest[0] if rest[0] >= sizes[-1] - 1 else None


def step_seconds(answer: Answer, steps_made: int | None, window: tuple[float, float]) -> float:
    """Time of one cycle (or plain step) within a time window; 0 when it holds none.

    `steps_made`: cycles of the whole answer after the prefill; None: one a token, as in plain decoding. Intervals are
    averaged over blocks of `BLOCK` cycles, and the median block counts.
    """
    low, high = window
    tokens = len(answer.tokens) - 1
    merged = steps_made is not None and steps_made != len(answer.pass_sizes)
    blocks: list[float] = []
    seconds, cycles = 0.0, 0.0
    for number in range(1, len(answer.times)):
        before, now = answer.times[number - 1], answer.times[number]
        if before < low or now > high:
            continue
        size = answer.counts[number]
        seconds += now - before
        if steps_made is None:
            cycles += size
        else:  # of merged chunks the share is estimated from their tokens
            cycles += size * steps_made / tokens if merged and tokens else bool(size)
        if cycles >= BLOCK:
            blocks.append(seconds / cycles)
            seconds, cycles = 0.0, 0.0
    if not blocks:
        return seconds / cycles if cycles else 0.0
    return statistics.median(blocks)


def full_batch(answers: Sequence[Answer]) -> tuple[float, float]:
    """From when the last of these answers began to decode to when the first of them was done: the batch was full.

    `NOTHING` when it never was. Answers of a single token decode nothing, so they do not count.
    """
    decoding = [answer for answer in answers if len(answer.tokens) > 1]
    if not decoding:
        return NOTHING
    window = max(answer.times[0] for answer in decoding), min(answer.times[-1] for answer in decoding)
    return window if window[0] < window[1] else NOTHING
