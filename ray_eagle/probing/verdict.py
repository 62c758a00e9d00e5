"""The verdict on a drafter: serve it, train it further, give up, or look for what is broken."""

from typing import Literal

VerdictName = Literal["serve", "fine-tune", "not-worth-it", "broken"]

NOISE = 1.02
"""An interval that reaches down to here cannot be told from a drafter that is never right."""

CHECKS = (
    "layer ids: does the engine read the config's aux layer ids as outputs of those layers (docs/maths.md)?",
    "head: is lm_head.weight in the file, under the name that the engine loads? An engine draws a random one silently",
    "vocabulary map: is d2t an offset (target id - draft id), and of the same training run as lm_head?",
    "context: is the drafter's max_position_embeddings at least the target's serving context?",
    "RoPE: do rope_theta and scaling equal those of training, in both the old and the new config keys?",
    "chat template: is the prompt built as in training, system prompt and thinking marks included?",
)


def verdict(
    interval: tuple[float, float], acceptance_length: float, break_even: float, steps: int
) -> tuple[VerdictName, list[str]]:
    """(name, reasons) from the acceptance length tau, its interval, and the break-even length R at `steps` draft steps.

    Decided in this order: `not-worth-it` when R >= steps + 1 (even a perfect drafter loses); `broken` when the interval
    reaches down to 1; `serve` when all of it lies above R; `fine-tune` otherwise.
    """
    low, high = interval
    measured = f"acceptance length {acceptance_length:.2f} [{low:.2f}, {high:.2f}], break-even {break_even:.2f}"
    speed = acceptance_length / break_even
    if break_even >= steps + 1:
        return "not-worth-it", [
            f"{measured}: with {steps} draft steps no drafter can exceed {steps + 1}, so none can pay here.",
            "Try another number of draft steps, or another machine or batch size: R does not depend on the drafter.",
        ]
    if low <= NOISE:
        return "broken", [f"{measured}: not distinguishable from 1, a drafter that is never right. Check:", *CHECKS]
    if low > break_even:
        return "serve", [f"{measured}: {speed:.2f} times as fast as plain decoding, and the whole interval pays."]
    reasons = [f"{measured}: {speed:.2f} times the speed of plain decoding."]
    if break_even <= high:
        reasons.append("Break-even lies inside the interval: more prompts would decide.")
    if acceptance_length < break_even:
        reasons.append(f"It misses break-even by {break_even - acceptance_length:.2f} accepted tokens a pass.")
    return "fine-tune", reasons
