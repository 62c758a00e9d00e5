"""The figures of the log: of training, summed since the last line, and of a validation."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ray_eagle.probing.predict import SamplePrediction, predicted_length
from ray_eagle.training.checkpoints import SCORE
from ray_eagle.training.losses import StepScores


def validation_figures(predictions: list[SamplePrediction], steps: int) -> dict[str, float]:
    """Pooled validation figures; `val_` losses and accuracies by step."""
    figures = {SCORE: predicted_length(predictions)}
    for k in range(steps):
        counted = max(1, sum(p.counted_K[k] for p in predictions))
        figures[f"val_accuracy_{k}"] = sum(p.right_K[k] for p in predictions) / counted
        figures[f"val_outside_vocab_{k}"] = sum(p.outside_K[k] for p in predictions) / counted
        figures[f"val_loss_{k}"] = sum(p.loss_sums_K[k] for p in predictions) / max(
            1, sum(p.entering_K[k] for p in predictions)
        )
    return figures


class Recent:
    """Sums since the last log line, of this worker, on its device."""

    def __init__(self, steps: int, device: torch.device, peak: float | None = None) -> None:
        """`peak`: floating-point operations a second of all devices together, where known."""
        self.steps, self.device, self.peak = steps, device, peak
        self._reset()

    def _reset(self) -> None:
        # rows: summed loss, positions in the loss, right choices
        self.sums_3K = torch.zeros(3, self.steps, dtype=torch.float64, device=self.device)
        self.counted = [0] * self.steps
        self.flops = 0.0
        self.norms: list[Tensor] = []
        self.rate = 0.0
        self.began = time.monotonic()

    def add(self, scores: list[StepScores], flops: float) -> Tensor:
        """Add a pack, and return its summed losses [K] float64."""
        self.flops += flops
        losses = [torch.where(s.enters_N, s.losses_N, 0.0).sum() for s in scores]
        counts = [x.sum(dtype=torch.float64) for x in [s.enters_N for s in scores] + [s.right_N for s in scores]]
        sums_3K = torch.stack([*losses, *counts]).view(3, -1)
        self.sums_3K += sums_3K
        self.counted = [count + len(s.at_N) for count, s in zip(self.counted, scores, strict=True)]
        return sums_3K[0]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What takes its time here is no training."""
        began = time.monotonic()
        yield
        self.began += time.monotonic() - began

    def end_step(self, norm: Tensor, rate: float) -> None:
        self.norms.append(norm)
        self.rate = rate

    def figures(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        here_2K = torch.tensor([self.counted, [self.flops] * self.steps], dtype=torch.float64, device=self.device)
        loss_K, entered_K, right_K, counted_K, flops_K = total(torch.cat([self.sums_3K, here_2K])).cpu()
        seconds = time.monotonic() - self.began
        figures = {
            "lr": self.rate,
            "grad_norm": float(torch.stack(self.norms).mean()),
            "tokens_per_second": float(counted_K[0]) / seconds,
        }
        if self.peak:
            figures["mfu"] = float(flops_K[0]) / seconds / self.peak
        for k in range(self.steps):
            figures[f"loss_{k}"] = float(loss_K[k] / entered_K[k].clamp(min=1))
            figures[f"accuracy_{k}"] = float(right_K[k] / counted_K[k].clamp(min=1))
            figures[f"outside_vocab_{k}"] = float(1 - entered_K[k] / counted_K[k].clamp(min=1))
        self._reset()
        return figures
