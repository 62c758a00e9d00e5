"""What a run costs in bytes and hours, before it starts."""

from ray_eagle.preflight.report import Estimate

AUX_STATES = 3
TEACHER_BYTES = 8  # a supervised token's top1 (int32) and log-sum-exp (float32)
ID_BYTES = 5  # a token's id (int32) and mask (uint8)


def estimate_run(
    *,
    hidden_size: int,
    samples: int,
    tokens_per_sample: float,
    supervised_share: float,
    state_bytes: int = 2,
    weights_bytes: int = 0,
    tokens_per_s: float | None = None,
) -> Estimate:
    """Size of the hidden-state dataset, and hours of extraction when its rate in tokens/s is given.

    `state_bytes` is the size of one stored number: 2 for bfloat16, 4 for float32.
    """
    tokens = round(samples * tokens_per_sample)
    supervised = round(tokens * supervised_share)
    per_state = hidden_size * state_bytes
    return Estimate(
        samples=samples,
        tokens=tokens,
        supervised_tokens=supervised,
        hidden_state_bytes=tokens * (AUX_STATES * per_state + ID_BYTES) + supervised * (per_state + TEACHER_BYTES),
        weights_bytes=weights_bytes,
        hours=tokens / tokens_per_s / 3600 if tokens_per_s else None,
    )


def human_bytes(count: float) -> str:
    """`1.1 TB`: decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
