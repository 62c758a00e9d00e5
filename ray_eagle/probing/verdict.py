"""The verdict on a drafter: serve it, train it further, give up, or look for what is broken."""

from collections.abc import Sequence
from typing import Literal

VerdictName = Literal["serve", "fine-tune", "not-worth-it", "broken"]

NOISE = 1.02
"""An interval that reaches down to here cannot be told from a drafter that is never right."""
ENGINE_LOSS = 1.1
"""A prediction this many times the served length, with intervals apart, is more than rounding explains."""

FEW_PASSES = 30
"""Below it no accepted draft at all proves little: one that is right in a tenth of all passes, which is little enough, shows
none in 30 passes with a chance of 4 % (0.9^30), in 10 passes with one of 35 %."""

CHECKS = (
    "Layer ids: the engine must read the config's aux layer ids as outputs of those layers (docs/maths.md).",
    "Head: lm_head.weight must be in the file, under the name that the engine loads, or it draws a random one silently.",
    "Vocabulary map: d2t must be an offset (target id - draft id), and of the same training run as lm_head.",
    "Context: the drafter's max_position_embeddings must be at least the target's serving context.",
    "RoPE: rope_theta and scaling must equal those of training, in both the old and the new config keys.",
    "Chat template: the prompt must be built as in training, system prompt and thinking marks included.",
)


def verdict(
    interval: tuple[float, float],
    acceptance_length: float,
    break_even: float,
    steps: int,
    *,
    speedup_interval: tuple[float, float] | None = None,
    predicted: tuple[float, tuple[float, float]] | None = None,
    flags: Sequence[str] = (),
    faults: Sequence[str] = (),
    unchecked: bool = False,
    passes: int | None = None,
) -> tuple[VerdictName, list[str]]:
    """(name, reasons) from the acceptance length tau, its interval, and the break-even length R at `steps` draft steps.

    Decided in this order: `broken` when the text is not the target's (`faults`); `not-worth-it` when R >= steps + 1 (even a
    perfect drafter loses); `broken` when the interval reaches down to 1; `serve` when all of it lies above R, and the
    speed-up's interval above 1; `broken` when the walk over captured states predicted clearly more (length, interval):
    then the engine loses it; `fine-tune` otherwise. `flags`: of the server that was measured. `unchecked`: there are
    differences from plain text, and none could be judged; then `serve` becomes `broken`. `passes`: complete ones that were
    measured. Each reason ends with a full stop, so that all of them read as sentences one after the other.
    """
    low, high = interval
    measured = f"Acceptance length {acceptance_length:.2f} [{low:.2f}, {high:.2f}], break-even {break_even:.2f}"
    speed = acceptance_length / break_even
    lost = _lost_by_the_engine(interval, acceptance_length, predicted)
    if faults:
        return "broken", [
            f"{measured}, but the text is not the target's own, so the figures mean nothing.",
            *faults,
            "The engine verifies wrongly: try another attention backend or version, and float32 or float16.",
        ]
    if break_even >= steps + 1:
        return "not-worth-it", [
            f"{measured}: with {steps} draft steps no drafter can exceed {steps + 1}, so none can pay here.",
            "Try another number of draft steps, or another machine or batch size: R hardly depends on the drafter.",
        ]
    if low <= NOISE:
        return "broken", _why_never_right(measured, acceptance_length, lost, predicted, passes)
    if low > break_even and (speedup_interval is None or speedup_interval[0] > 1):
        reasons = [f"{measured}: {speed:.2f} times as fast as plain decoding, and the whole interval pays."]
        if unchecked:
            return "broken", [
                *reasons,
                "But text differs from the target's own, and for no difference is it known whether rounding explains it.",
                "Probe again with more plain_prompts, or in float32, where no text may differ.",
                *lost,
            ]
        if flags:
            reasons.append(f"Serve it with `{' '.join(flags)}`.")
        return "serve", reasons + lost
    if lost:
        return "broken", [f"{measured}: {speed:.2f} times the speed of plain decoding.", *lost, *CHECKS]
    reasons = [f"{measured}: {speed:.2f} times the speed of plain decoding."]
    if break_even <= high:
        reasons.append("Break-even lies inside the interval: more prompts would decide.")
    if acceptance_length < break_even:
        reasons.append(f"It misses break-even by {break_even - acceptance_length:.2f} accepted tokens a pass.")
    if predicted:
        needed = break_even * predicted[0] / acceptance_length
        reasons.append(
            f"The walk over captured states predicted {predicted[0]:.2f}; the training curve (its acceptance length) would "
            f"have to pass {needed:.2f}."
        )
    return "fine-tune", reasons


def _why_never_right(
    measured: str,
    served: float,
    lost: list[str],
    predicted: tuple[float, tuple[float, float]] | None,
    passes: int | None,
) -> list[str]:
    """The drafter, the engine, or chance: nobody is blamed for what the walk or the number of passes says otherwise."""
    never = f"{measured}: not distinguishable from 1, a drafter that is never right."
    weak = []
    if predicted and predicted[0] < ENGINE_LOSS * served:
        length, (low, high) = predicted
        weak = [
            f"The walk over captured states predicts the same, {length:.2f} [{low:.2f}, {high:.2f}]: the drafter itself is weak, "
            "not the engine. It was trained too little, or on too little or foreign text."
        ]
    if passes is not None and passes < FEW_PASSES:
        few = f"Only {passes} verify passes were complete, and fewer than {FEW_PASSES} prove little: more prompts would decide."
        return [*weak, never, few]
    return [*weak, never] if weak else [*lost, never, *CHECKS]


def _lost_by_the_engine(
    interval: tuple[float, float], served: float, predicted: tuple[float, tuple[float, float]] | None
) -> list[str]:
    if predicted is None:
        return []
    length, (low, high) = predicted
    if length < ENGINE_LOSS * served or low <= interval[1]:
        return []
    return [
        f"The same drafter walks over captured states at {length:.2f} [{low:.2f}, {high:.2f}] but was served at "
        f"{served:.2f}: the engine is at fault, not the drafter."
    ]
