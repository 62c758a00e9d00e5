"""The Ray Train worker: forward, backward and optimizer steps over globally planned packs, resumable at any step.

The cursor is the number of optimizer steps done. Packs of a step are dealt to workers in turn; every loss is divided by the
positions that enter it in the whole step, so neither the number of workers nor empty ones change what is learned.
"""

import json
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ray_eagle.config import Config, TrainConfig
from ray_eagle.drafter.start import channel_rms, start_drafter
from ray_eagle.errors import WorkerError
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.hidden_states.schema import Sample
from ray_eagle.probing.predict import SamplePrediction, predict, predicted_length
from ray_eagle.run import LOGS, RunFolder
from ray_eagle.target.loading import TargetFacts, choose_dtype, head_and_embedding
from ray_eagle.training.losses import Objective, StepScores, entering_counts, loss_weights
from ray_eagle.training.optimizer import clip_and_step, make_optimizer
from ray_eagle.training.packing import Pack, make_pack
from ray_eagle.training.pointwise import PLAIN, compiled
from ray_eagle.training.schedule import epoch_steps, learning_rate
from ray_eagle.training.unroll import train_pack
from ray_eagle.training.weights import Weights
from ray_eagle.vocab import read_map

STATE = "state.pt"
HISTORY = "train.jsonl"
SCORE = "predicted_acceptance_length"


@dataclass(frozen=True)
class TrainJob:
    """What a worker is told: settings and places, no tensors."""

    config: Config
    run: RunFolder
    facts: TargetFacts


def train_loop(job: dict[str, Any]) -> None:
    """Body of each Ray Train worker."""
    import ray.train

    trainer = Trainer(job["job"], ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size())
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            trainer.load(Path(folder) / STATE)
    while trainer.step < trainer.total_steps:
        trainer.train_step()
        if trainer.at_checkpoint():
            metrics = trainer.validate()
            with tempfile.TemporaryDirectory() as folder:
                if trainer.rank == 0:
                    trainer.save(Path(folder) / STATE)
                    ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
                else:
                    ray.train.report(metrics)


class Trainer:
    """One worker's model, optimizer and data; plain torch, usable without Ray."""

    def __init__(self, job: TrainJob, rank: int = 0, world: int = 1) -> None:
        self.job, self.rank, self.world = job, rank, world
        self.settings: TrainConfig = job.config.train
        self.device = torch.device("cuda" if self.settings.use_gpu else "cpu")
        torch.set_num_threads(max(1, round(self.settings.cpus_per_worker)))
        if self.settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses
        torch.use_deterministic_algorithms(self.settings.deterministic)
        self.compute = choose_dtype(self.settings.compute_dtype, self.device)
        d2t, t2d = read_map(job.run.of("vocab"))
        seed = job.config.seed
        self.data = HiddenStates(job.run.of("extract"), "train").by_id()
        rms_C = channel_rms(self.data)
        self.drafter = start_drafter(job.config.drafter, job.facts, d2t, t2d, seed, rms_C).to(self.device)
        self.drafter.inverse_frequencies = self.drafter.inverse_frequencies.to(self.device)
        head_VH, embedding_VH, _ = head_and_embedding(job.facts)
        self.draft_head_DH = head_VH[self.drafter.target_ids.cpu()].to(self.device, self.compute)
        self.embedding_VH = embedding_VH.to(self.device, self.compute)
        self.weights = Weights(
            self.drafter,
            self.compute,
            eight_bits=self.settings.fp8,
            pointwise=compiled() if self.settings.compile else PLAIN,
        )
        self.objective = Objective(self.settings.objective, self.settings.labels)
        self.validation = HiddenStates(job.run.of("extract"), "validation").shard(rank, world)
        self.lengths = self.data.lengths()
        epochs = [self._epoch(e) for e in range(self.settings.epochs)]
        self.plan = [packs for epoch in epochs for packs in epoch]
        self.epoch_ends = list(accumulate(map(len, epochs)))
        self.total_steps = len(self.plan)
        s = self.settings
        self.optimizer = make_optimizer(self.drafter, lr=s.lr, betas=s.betas, weight_decay=s.weight_decay)
        self.generator = torch.Generator(self.device).manual_seed(seed + rank)
        self.step = 0
        self._reading: Iterator[list[Sample]] | None = None
        self.history = History(job.run) if rank == 0 else None
        self._recent = _Recent(self.settings.unroll_steps, self.device)
        self._unchecked: deque[_Unchecked] = deque()

    def _epoch(self, epoch: int) -> list[list[list[int]]]:
        s = self.settings
        return epoch_steps(self.lengths, s.tokens_per_pack, s.packs_per_step, self.job.config.seed, epoch)

    def at_checkpoint(self) -> bool:
        """At the end of every epoch, and every `checkpoint_every` steps."""
        return self.step in self.epoch_ends or self.step % self.settings.checkpoint_every == 0

    def train_step(self) -> None:
        """One optimizer step over this worker's share of the step's packs, without waiting for a GPU.

        A step whose gradient is not finite changes nothing, and raises WorkerError: at once on a CPU, one step late or at
        the next report on a GPU.
        """
        s = self.settings
        if self._reading is None:
            wanted = (pack for step in self.plan[self.step :] for pack in self._mine(step))
            self._reading = self.data.batches(wanted, pin=self.device.type == "cuda")
        packs = [self._pack(next(self._reading)) for _ in self._mine(self.plan[self.step])]
        counts_K = sum(
            (entering_counts(pack, self.drafter.t2d) for pack in packs),
            start=torch.zeros(s.unroll_steps, dtype=torch.int64, device=self.device),
        )
        weights_K = loss_weights(self._sum(counts_K), s.step_decay).float()
        names = tuple(pack.names for pack in packs)
        losses = []
        for pack in packs:
            scores = train_pack(self.weights, pack, self.embedding_VH, self.draft_head_DH, weights_K, self.objective)
            losses.append(self._recent.add(scores) @ weights_K.double())
        if not packs:  # this worker adds zeros
            self.weights.gather()
            self.weights.settle()
        rate = learning_rate(self.step, self.total_steps, peak=s.lr, floor=s.lr_floor, warmup_share=s.warmup_share)
        norm = self._update(rate)
        self._unchecked.append(_Unchecked(self.step, norm, losses, names))
        self.step += 1
        self._recent.end_step(norm, rate)
        self._check(waiting=int(self.device.type == "cuda"))
        if self.step % s.report_every == 0 or self.step == self.total_steps:
            self._check()
            self._log(self._recent.figures(self._sum))

    def _update(self, rate: float) -> Tensor:
        """Sum the gradients over workers, clip them and step, all of it on the device. Returns their norm before."""
        for parameter in self.drafter.parameters():
            if self.world > 1 and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        norm = clip_and_step(self.optimizer, rate, self.settings.clip)
        self.weights.refresh()
        return norm

    def _check(self, waiting: int = 0) -> None:
        """Raise WorkerError for a step without a finite gradient, leaving the newest `waiting` steps for later."""
        while len(self._unchecked) > waiting:
            found = self._unchecked.popleft()
            if bool(found.norm.isfinite()):
                continue
            losses = [loss.item() for loss in found.losses]
            bad = [
                f"{loss}, in samples {', '.join(names)}"
                for loss, names in zip(losses, found.names, strict=True)
                if not math.isfinite(loss)
            ]
            where = "; ".join(bad) or f"finite here, but not its gradient: samples {', '.join(sum(found.names, ()))}"
            raise WorkerError(
                f"train: the loss of step {found.step} is {where}. The weights were not changed by it. Lower train.lr, or run "
                "`ray-eagle verify` on the hidden states."
            )

    def _mine(self, step: list[list[int]]) -> list[list[int]]:
        """This worker's packs of a step."""
        return step[self.rank :: self.world]

    def _pack(self, samples: list[Sample]) -> Pack:
        everywhere, pin = not self.settings.supervised_only, self.device.type == "cuda"
        pack = make_pack(samples, self.settings.unroll_steps, everywhere=everywhere, pin=pin)
        pack = pack.to(self.device, self.compute)
        return replace(pack, aux_TC=add_noise(pack.aux_TC, self.settings, self.generator))

    def _sum(self, tensor: Tensor) -> Tensor:
        """The sum over all workers."""
        if self.world == 1:
            return tensor
        moved = tensor.to(self.device)  # NCCL knows no CPU tensors
        dist.all_reduce(moved)
        return moved.to(tensor.device)

    def validate(self) -> dict[str, float]:
        """Predicted acceptance length and accuracies over this run's validation conversations, the same on all workers."""
        predictions = predict(
            self.drafter,
            iter(self.validation),
            self.embedding_VH,
            self.draft_head_DH,
            self.settings.unroll_steps,
            weights=self.weights,
        )
        if self.world > 1:
            gathered: list[Any] = [None] * self.world
            dist.all_gather_object(gathered, predictions)
            predictions = [p for part in gathered for p in part]
        figures = validation_figures(predictions, self.settings.unroll_steps)
        self._log(figures)
        return {**figures, "step": float(self.step)}

    def _log(self, figures: dict[str, float]) -> None:
        if self.history:
            epoch = sum(self.step > end for end in self.epoch_ends[:-1]) + 1
            self.history.add({"step": self.step, "steps": self.total_steps, "epoch": epoch, **figures})

    def save(self, path: Path) -> None:
        """Everything that decides the rest of the run: weights, optimizer, cursor, random state."""
        self._check()
        state = {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "generator": self.generator.get_state(),
            "history": self.history.text() if self.history else "",
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.drafter.load_state_dict(state["drafter"])
        self.weights.refresh()
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self._reading = None
        self.generator.set_state(state["generator"].cpu())
        if self.history:
            self.history.restore(state["history"])


def add_noise(aux_TC: Tensor, settings: TrainConfig, generator: torch.Generator) -> Tensor:
    """Aux states with uniform noise in [-noise, noise], or Gaussian noise of that deviation."""
    if not settings.noise:
        return aux_TC
    noise = torch.empty_like(aux_TC)
    if settings.noise_kind == "uniform":
        noise.uniform_(-settings.noise, settings.noise, generator=generator)
    else:
        noise.normal_(std=settings.noise, generator=generator)
    return noise.add_(aux_TC)


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


@dataclass(frozen=True)
class _Unchecked:
    """A step whose gradient may not be finite: what must be known to say so."""

    step: int
    norm: Tensor
    losses: list[Tensor]
    """Of each pack of this worker,"""
    names: tuple[tuple[str, ...], ...]
    """and its samples."""


class _Recent:
    """Sums since the last log line, of this worker, on its device."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.steps, self.device = steps, device
        self._reset()

    def _reset(self) -> None:
        # rows: summed loss, positions in the loss, right choices, positions that count
        self.sums_4K = torch.zeros(4, self.steps, dtype=torch.float64, device=self.device)
        self.norms: list[Tensor] = []
        self.rate = 0.0
        self.began = time.monotonic()

    def add(self, scores: list[StepScores]) -> Tensor:
        """Add a pack, and return its summed losses [K] float64."""
        losses = torch.stack([torch.where(s.enters_N, s.losses_N, 0.0).sum() for s in scores]).double()
        entered, right = (
            torch.stack([x.sum() for x in xs]) for xs in zip(*((s.enters_N, s.right_N) for s in scores), strict=False)
        )
        counted = torch.tensor([len(s.at_N) for s in scores], dtype=torch.float64).to(self.device, non_blocking=True)
        self.sums_4K += torch.stack([losses, entered.double(), right.double(), counted])
        return losses

    def end_step(self, norm: Tensor, rate: float) -> None:
        self.norms.append(norm)
        self.rate = rate

    def figures(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        loss_K, entered_K, right_K, counted_K = total(self.sums_4K.clone()).cpu()
        seconds = time.monotonic() - self.began
        figures = {
            "lr": self.rate,
            "grad_norm": float(torch.stack(self.norms).mean()),
            "tokens_per_second": float(counted_K[0]) / seconds,
        }
        for k in range(self.steps):
            figures[f"loss_{k}"] = float(loss_K[k] / entered_K[k].clamp(min=1))
            figures[f"accuracy_{k}"] = float(right_K[k] / counted_K[k].clamp(min=1))
            figures[f"outside_vocab_{k}"] = float(1 - entered_K[k] / counted_K[k].clamp(min=1))
        self._reset()
        return figures


class History:
    """The curves of a run: logs/train.jsonl, TensorBoard events beside it, and gauges on the Ray dashboard."""

    def __init__(self, run: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = run.folder(LOGS)
        self.folder.create()
        self.rows: list[dict[str, float]] = []
        self.board = SummaryWriter(self.folder.file("tensorboard")) if self.folder.is_local else None
        self.gauges: dict[str, Any] = {}

    def add(self, row: dict[str, float]) -> None:
        from ray.util.metrics import Gauge

        self.rows.append(row)
        self.folder.write_jsonl(HISTORY, self.rows)
        for name, value in row.items():
            if self.board and name not in ("step", "steps"):
                self.board.add_scalar(name, value, int(row["step"]))
            if name not in self.gauges:
                self.gauges[name] = Gauge(f"eagle_train_{name}", description=f"{name} of the training run")
            self.gauges[name].set(value)
        if self.board:
            self.board.flush()

    def text(self) -> str:
        return json.dumps(self.rows)

    def restore(self, text: str) -> None:
        """Go back to the rows of a checkpoint: what a killed worker logged after it is logged again."""
        self.rows = json.loads(text)
        self.folder.write_jsonl(HISTORY, self.rows)
