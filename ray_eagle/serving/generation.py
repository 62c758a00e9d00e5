"""One answer and the verify passes that made it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class VerifyPass:
    """One cycle. `start` is the index t, in prompt + answer, of the position that drafted: d1 is a guess of x[t+2]."""

    start: int
    drafted: list[int]
    accepted: int
    bonus: int


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
    """Median time of one plain step or one speculative cycle, which a hiccup of the machine does not move; 0 without any."""


def complete_passes(generation: Generation, prompt_length: int, steps: int) -> list[VerifyPass]:
    """The passes whose whole chain lies in the answer: the cut one at the end would count tokens that no one asked for.

    The same passes as in a walk over captured states (`ray_eagle.probing.walk`).
    """
    last = prompt_length + len(generation.tokens) - 1
    return [p for p in generation.passes if p.start + 1 + steps <= last]
