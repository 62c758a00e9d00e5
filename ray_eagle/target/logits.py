"""What a target does to its head's output before the softmax, by config.json alone: so its teacher needs the head alone."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
"""Keys of Cohere and Falcon-H1."""
DIVISORS = ("logits_scaling",)
"""Key of Granite and MiniCPM."""
CAP = "final_logit_softcapping"
"""Key of Gemma."""


@dataclass(frozen=True)
class LogitRule:
    """logits = cap * tanh(scale * x / cap) of the head's output x; without a cap, scale * x.

    The order of tokens is that of x, so the most likely one needs no rule.
    """

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(text: dict[str, Any]) -> "LogitRule":
        """By the language model's own settings. `checks.check_head` proves it on each loaded target."""
        scale = 1.0
        for key in MULTIPLIERS:
            scale *= text.get(key) or 1.0
        for key in DIVISORS:
            scale /= text.get(key) or 1.0
        return LogitRule(float(scale), text.get(CAP))

    def apply_(self, head_output: Tensor) -> Tensor:
        """The logits, of any shape, in place."""
        if self.scale != 1.0:
            head_output.mul_(self.scale)
        if self.cap is not None:
            head_output.div_(self.cap).tanh_().mul_(self.cap)
        return head_output

    def scaled(self, head: Tensor) -> Tensor:
        """The rows of a head [.., H] whose plain output is these logits, but for the cap."""
        return head if self.scale == 1.0 else head * self.scale

    def __str__(self) -> str:
        return f"{self.scale:g} x" if self.cap is None else f"{self.cap:g} tanh({self.scale:g} x / {self.cap:g})"


UNCHANGED = LogitRule()
