"""What a run costs in bytes and hours, before it starts."""

from ray_eagle.preflight.report import Estimate


def estimate_run(
    *,
    hidden_size: int,
    samples: int,
    tokens_per_sample: float,
    supervised_share: float,
    state_dtype: str = "bfloat16",
    weights_bytes: int = 0,
    tokens_per_s: float | None = None,
) -> Estimate:
    """Size of the hidden-state dataset, and hours of extraction when its rate in tokens/s is given."""
    from ray_eagle.hidden_states.schema import sample_bytes  # with torch, which the drafter commands do without

    tokens = round(samples * tokens_per_sample)
    supervised = round(tokens * supervised_share)
    return Estimate(
        samples=samples,
        tokens=tokens,
        supervised_tokens=supervised,
        hidden_state_bytes=sample_bytes(tokens, supervised, hidden_size, state_dtype),
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
