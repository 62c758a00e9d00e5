"""One answer and the verify passes that made it."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class VerifyPass:
    """One cycle. `start` is the index t, in prompt + answer, of the position that drafted: d1 is a guess of x[t+2]."""

    start: int
    """-1 where the engine tells how many drafts its passes accepted, but not in which order."""
    drafted: list[int]
    """All drafts; a server tells only those that were accepted."""
    accepted: int
    bonus: int
    """-1 when it lies beyond the answer's end, or with an unknown start."""


@dataclass(frozen=True)
class Generation:
    """One answer and how it was made."""

    tokens: list[int]
    """New tokens, the end-of-sequence token included."""
    passes: list[VerifyPass]
    """Verify passes in order; none for plain decoding. The last may reach beyond the answer's end."""
    finish_reason: Literal["stop", "length"]
    prefill_seconds: float
    decode_seconds: float
    """Everything after the prefill."""
    decode_tokens: int
    """Tokens made in that time: all but the first, which the prefill gives."""
    step_seconds: float
    """Median time of one plain step or one speculative cycle, which a hiccup of the machine does not move; 0 without any.
    Of several requests at once: while all of them were decoding, so at the full batch size."""
    gaps: list[float] = field(default_factory=list)
    """Log-probability of the best token less that of the second, at each token, where asked for."""


def complete_passes(generation: Generation, prompt_length: int, steps: int) -> list[VerifyPass]:
    """The passes whose whole chain lies in the answer: the cut one at the end would count tokens that no one asked for.

    The same passes as in a walk over captured states (`ray_eagle.probing.walk`). Passes of unknown start come last and
    are all kept: which of them was cut is not known, the server counted its drafts whole, and to leave out one that is
    chosen by its length would bend the mean.
    """
    last = prompt_length + len(generation.tokens) - 1
    known = [p for p in generation.passes if p.start >= 0 and p.start + 1 + steps <= last]
    return known + [p for p in generation.passes if p.start < 0]
