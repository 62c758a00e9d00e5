"""The Ray Train worker: forward, backward and optimizer steps over globally planned packs, resumable at any step.

The cursor is the number of optimizer steps done. Packs of a step are dealt to workers in turn; every loss is divided by the
positions that enter it in the whole step, so neither the number of workers nor empty ones change what is learned.
"""

import hashlib
import logging
import math
import os
import tempfile
from collections import deque
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ray_eagle.config import Config, TrainConfig
from ray_eagle.drafter.start import channel_rms, start_drafter
from ray_eagle.errors import CheckpointError, ConfigError, WorkerError
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.probing.predict import predict
from ray_eagle.run import CHECKPOINTS, RunFolder
from ray_eagle.target.loading import TargetFacts, choose_dtype, head_and_embedding, take_device
from ray_eagle.training import fp8
from ray_eagle.training.checkpoints import STATE, Checkpoints, Record, describe
from ray_eagle.training.figures import Recent, validation_figures
from ray_eagle.training.flops import pack_flops, peak_tflops
from ray_eagle.training.losses import Objective, entering_counts, loss_weights
from ray_eagle.training.optimizer import clip_and_step, make_optimizer
from ray_eagle.training.packing import Pack, read_packs
from ray_eagle.training.pointwise import PLAIN, compiled
from ray_eagle.training.schedule import epoch_steps, learning_rate
from ray_eagle.training.trackers import History
from ray_eagle.training.unroll import train_pack
from ray_eagle.training.weights import Weights
from ray_eagle.vocab import read_map

logger = logging.getLogger(__name__)

SMALL = 2048
"""Up to this hidden size a GPU waits for its host, which takes 240 instead of 25 microseconds (measured on an H200's) to start
a product with a number of rows that cuBLAS has not seen before."""
MULTIPLE = 64
"""There rows come in multiples of this."""


@dataclass(frozen=True)
class TrainJob:
    """What a worker is told: settings and places, no tensors."""

    config: Config
    run: RunFolder
    facts: TargetFacts


def train_loop(job: dict[str, Any]) -> None:
    """Body of each Ray Train worker."""
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    trainer = Trainer(job["job"], context.get_world_rank(), context.get_world_size())
    checkpoints = Checkpoints(trainer.job.run.folder(CHECKPOINTS))
    newest = checkpoints.newest(logger.warning) if trainer.rank == 0 else None
    # the record itself: another node's listing of the folder may be older, and must not decide what its ranks start from
    if found := broadcast_from_rank_zero(asdict(newest) if newest else None):
        trainer.load(checkpoints.load(Record(**found), trainer.device))
    try:
        while trainer.step < trainer.total_steps:
            trainer.train_step()
            if trainer.at_checkpoint():
                trainer.check()  # or what the GPU still does would count as the pause's
                with trainer.recent.paused():
                    _checkpoint(trainer, checkpoints)
    finally:
        trainer.close()


def _checkpoint(trainer: "Trainer", checkpoints: Checkpoints) -> None:
    """Validate on all workers; the first one saves."""
    import ray.train

    figures = trainer.validate()
    if trainer.rank:
        ray.train.report(figures)
        return
    experiment = ray.train.get_context().get_experiment_name()
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder) / STATE)
        record = describe(Path(folder) / STATE, experiment, trainer.step, figures)
        ray.train.report(
            figures,
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=record.folder.partition("/")[2],
        )
    checkpoints.commit(record, trainer.settings.keep_checkpoints)


class Trainer:
    """One worker's model, optimizer and data; plain torch, usable without Ray."""

    def __init__(self, job: TrainJob, rank: int = 0, world: int = 1) -> None:
        self.job, self.rank, self.world = job, rank, world
        self.settings: TrainConfig = job.config.train
        self.device = take_device(self.settings.cpus_per_worker, self.settings.use_gpu)
        if self.settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses
        torch.use_deterministic_algorithms(self.settings.deterministic)
        self.compute = choose_dtype(self.settings.compute_dtype, self.device)
        d2t, t2d = read_map(job.run.of("vocab"))
        seed = job.config.seed
        self.data = HiddenStates(job.run.of("extract"), "train").by_id()
        rms_C = None if job.config.drafter.path else channel_rms(self.data)
        moves = not job.config.vocab.keep_given
        drafter = start_drafter(job.config.drafter, job.facts, d2t, t2d, seed, rms_C, reindex=moves)
        self.drafter = drafter.to(self.device)
        self.drafter.inverse_frequencies = self.drafter.inverse_frequencies.to(self.device)
        head_VH, embedding_VH, _ = head_and_embedding(job.facts)
        self.draft_head_DH = head_VH[self.drafter.target_ids.cpu()].to(self.device, self.compute)
        self.embedding_VH = embedding_VH.to(self.device, self.compute)
        if self.settings.fp8 and self.device.type == "cuda" and torch.cuda.get_device_capability() < fp8.CAPABILITY:
            raise ConfigError(
                f"train.fp8: expected a GPU with 8-bit matrix products (compute capability 8.9 or later), found "
                f"{torch.cuda.get_device_name()}. Set train.fp8 to false."
            )
        compiles = self.settings.use_gpu if self.settings.compile is None else self.settings.compile
        pointwise = compiled() if compiles else PLAIN
        self.weights = Weights(self.drafter, self.compute, eight_bits=self.settings.fp8, pointwise=pointwise)
        self.objective = Objective(self.settings.objective, self.settings.labels, logits=job.facts.logits)
        self.validation = HiddenStates(job.run.of("extract"), "validation").shard(rank, world)
        self.lengths = self.data.lengths()
        epochs = [self._epoch(e) for e in range(self.settings.epochs)]
        self.plan = [packs for epoch in epochs for packs in epoch]
        self.epoch_ends = list(accumulate(map(len, epochs)))
        self.total_steps = len(self.plan)
        s = self.settings
        self.optimizer = make_optimizer(self.drafter, lr=s.lr, betas=s.betas, weight_decay=s.weight_decay)
        self.generator = torch.Generator(self.device)
        self.step = 0
        self._packs: Generator[Pack] | None = None
        self.history = History(job.run, s.trackers) if rank == 0 else None
        self.recent = Recent(s.unroll_steps, self.device, self._peak())
        self._unchecked: deque[_Unchecked] = deque()

    def _peak(self) -> float | None:
        """Floating-point operations a second of all workers' devices."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        tflops = self.settings.peak_tflops or peak_tflops(name)
        return tflops * 1e12 * self.world if tflops else None

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
        if self._packs is None:
            wanted = (pack for step in self.plan[self.step :] for pack in self._mine(step))
            gpu = self.device.type == "cuda"  # which computes while its next pack is made
            multiple = MULTIPLE if gpu and self.drafter.shape.hidden_size <= SMALL else 1
            self._packs = read_packs(
                self.data,
                wanted,
                s.unroll_steps,
                everywhere=not s.supervised_only,
                pin=gpu,
                multiple=multiple,
                aside=gpu,
            )
        packs, flops = [], []
        for index in range(len(self.plan[self.step]))[self.rank :: self.world]:
            pack, operations = self._sent(next(self._packs), index)
            packs.append(pack)
            flops.append(operations)
        counts_K = sum(
            (entering_counts(pack, self.drafter.t2d) for pack in packs),
            start=torch.zeros(s.unroll_steps, dtype=torch.int64, device=self.device),
        )
        weights_K = loss_weights(self._sum(counts_K), s.step_decay).float()
        names = tuple(pack.names for pack in packs)
        losses = []
        for pack, operations in zip(packs, flops, strict=True):
            scores = train_pack(self.weights, pack, self.embedding_VH, self.draft_head_DH, weights_K, self.objective)
            losses.append(self.recent.add(scores, operations) @ weights_K.double())
        if not packs:  # this worker adds zeros
            self.weights.gather()
            self.weights.settle()
        rate = learning_rate(self.step, self.total_steps, peak=s.lr, floor=s.lr_floor, warmup_share=s.warmup_share)
        norm = self._update(rate)
        self._unchecked.append(_Unchecked(self.step, norm, losses, names))
        self.step += 1
        self.recent.end_step(norm, rate)
        self.check(waiting=int(self.device.type == "cuda"))
        if self.step % s.report_every == 0 or self.step == self.total_steps:
            self.check()
            self._log(self.recent.figures(self._sum))

    def _update(self, rate: float) -> Tensor:
        """Sum the gradients over workers, clip them and step, all of it on the device. Returns their norm before."""
        for parameter in self.drafter.parameters():
            if self.world > 1 and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        norm = clip_and_step(self.optimizer, rate, self.settings.clip)
        self.weights.refresh()
        return norm

    def check(self, waiting: int = 0) -> None:
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

    def _sent(self, pack: Pack, index: int) -> tuple[Pack, float]:
        """Pack number `index` of this step on the device, and the floating-point operations it takes.

        Its noise depends on seed, step and index alone, whichever worker draws it and however often training was resumed.
        """
        flops = pack_flops(self.drafter.shape, pack)
        pack = pack.to(self.device, self.compute)
        self.generator.manual_seed(noise_seed(self.job.config.seed, self.step, index))
        return replace(pack, aux_TC=add_noise(pack.aux_TC, self.settings, self.generator)), flops

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
            logits=self.job.facts.logits,
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
        self.check()
        state = {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "history": self.history.save() if self.history else "",
        }
        torch.save(state, path)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, on any number of workers. Raises CheckpointError when its map is not the run's."""
        if not torch.equal(state["drafter"]["d2t"].to(self.device), self.drafter.d2t):
            raise CheckpointError(
                "checkpoint: expected the vocabulary map of the run, found another one, to which its head rows belong. "
                "Begin again with `ray-eagle train --redo`."
            )
        self.drafter.load_state_dict(state["drafter"])
        self.weights.refresh()
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self._stop_reading()
        if self.history:
            self.history.restore(state["history"])

    def close(self) -> None:
        """Nothing is read any more, and everything is logged."""
        self._stop_reading()
        if self.history:
            self.history.close()

    def _stop_reading(self) -> None:
        if self._packs:
            self._packs.close()
        self._packs = None


def noise_seed(seed: int, step: int, index: int) -> int:
    """Of the noise of pack `index` of a step: 63 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest()) >> 1


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


@dataclass(frozen=True)
class _Unchecked:
    """A step whose gradient may not be finite: what must be known to say so."""

    step: int
    norm: Tensor
    losses: list[Tensor]
    """Of each pack of this worker,"""
    names: tuple[tuple[str, ...], ...]
    """and its samples."""
