"""Counters and gauges on the Ray dashboard and Prometheus, all named eagle_{stage}_* (Ray adds its own prefix)."""

from typing import Any


class Counters:
    """What one actor of a stage does, tagged with its name: `add(tokens=5)` counts up, `set(tokens_per_s=2.5)` is a gauge."""

    def __init__(self, stage: str, actor: str = "") -> None:
        self._stage = stage
        self._tags = {"actor": actor}
        self._metrics: dict[str, Any] = {}

    def add(self, **amounts: int) -> None:
        from ray.util.metrics import Counter

        for name, amount in amounts.items():
            if amount > 0:
                self._metric(Counter, name).inc(amount)

    def set(self, **values: float) -> None:
        from ray.util.metrics import Gauge

        for name, value in values.items():
            self._metric(Gauge, name).set(value)

    def _metric(self, kind: Any, name: str) -> Any:
        if name not in self._metrics:
            metric = kind(f"eagle_{self._stage}_{name}", description=f"{name} of {self._stage}", tag_keys=("actor",))
            metric.set_default_tags(self._tags)
            self._metrics[name] = metric
        return self._metrics[name]
