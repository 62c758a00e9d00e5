"""Counters on the Ray dashboard and Prometheus, all named eagle_* (Ray adds its own prefix)."""


class Counters:
    """Counts of one stage in one actor: samples, tokens and bytes."""

    def __init__(self, stage: str) -> None:
        from ray.util.metrics import Counter

        self._counters = {
            unit: Counter(f"eagle_{stage}_{unit}", description=f"{unit} done by {stage}")
            for unit in ("samples", "tokens", "bytes")
        }

    def add(self, **amounts: int) -> None:
        for unit, amount in amounts.items():
            if amount > 0:
                self._counters[unit].inc(amount)
