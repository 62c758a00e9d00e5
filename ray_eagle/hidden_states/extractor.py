"""The body of an extraction actor: capture on the device, copy, encode and write, all at the same time.

Two units may be in work at once: while the device computes the packs of one, the last packs of the other are still on their
way to the disk. Memory is bounded by the slots of the staging area; when the disk is slower, the device waits.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from ray_eagle.config import ExtractConfig, TargetConfig
from ray_eagle.errors import TargetError, WorkerLost
from ray_eagle.hidden_states.plan import Quarantined, TokenSample, Unit, plan_packs
from ray_eagle.hidden_states.quantise import quantise
from ray_eagle.hidden_states.schema import STATE_DTYPES, Sample, last_dtype
from ray_eagle.hidden_states.shard import ShardWriter, UnitRecord
from ray_eagle.hidden_states.staging import Fetched, Staging
from ray_eagle.metrics import Counters
from ray_eagle.pool import this_node
from ray_eagle.run import Folder
from ray_eagle.target.capture import StageOutput, TokenPack
from ray_eagle.target.loading import TargetFacts, take_device
from ray_eagle.target.stage import load_stage

AUX = ("aux", "aux_scale", "finite")
"""What `stored_aux` gives."""
CONCURRENCY = 2
"""Units in work at once in one actor."""


class Extractor:
    """Holds the whole target; every method may be called from several threads."""

    def __init__(
        self, target: TargetConfig, facts: TargetFacts, settings: ExtractConfig, folder: Folder, name: str = "extractor"
    ) -> None:
        device = take_device(settings.cpus, settings.gpus)
        self.facts, self.settings = facts, settings
        self.stage = load_stage(facts, target, device)
        self._prepare(Shelf(facts, settings, folder, Staging(device), name))

    def _prepare(self, shelf: "Shelf") -> None:
        self.shelf = shelf
        self.computing = threading.Lock()

    def ready(self) -> str:
        """The node that this actor runs on."""
        return this_node()

    def work(self, unit: Unit, without: frozenset[str] = frozenset()) -> UnitRecord:
        """Capture a unit into one attempt file; returns the record that would commit it.

        Samples named in `without` are left out; the packs are the planned ones all the same.
        """
        with device_errors(self.settings.tokens_per_batch), closing(self.shelf.open(unit)) as shelved:
            with self.computing:
                for number, samples in enumerate(packs_of(unit, without, self.settings.tokens_per_batch)):
                    shelved.put(number, samples, *self.capture(samples))
            return shelved.finish()

    def trial(self, unit: Unit, index: int) -> None:
        """Capture one sample of a unit alone, and forget it: does it kill this actor?"""
        samples = [unit.samples[index]]
        with device_errors(self.settings.tokens_per_batch), self.computing:
            teacher, layers = self.capture(samples)
        with self.shelf.staging.fetch(teacher | joined_aux(layers)) as host:
            list(rows_of(samples, host, self.shelf.not_finite))

    def capture(self, samples: Sequence[TokenSample]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """`stored_teacher` and `stored_aux` of packed samples, on the device."""
        output = self.stage.run(TokenPack.of([(s.input_ids, s.loss_mask) for s in samples]), None)
        return stored_teacher(output, self.settings.state_dtype), stored_aux(output, self.settings.state_dtype)


@contextmanager
def device_errors(budget: int) -> Iterator[None]:
    """Too little GPU memory is said with its way out; any other failure of the GPU is the death of its actor (WorkerLost)."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"extract: a pack of up to {budget} tokens does not fit the GPU ({str(error).splitlines()[0]}). Lower "
            "extract.tokens_per_batch, or raise extract.stages; then run again: what was committed is kept."
        ) from None
    except torch.AcceleratorError as error:
        raise WorkerLost(f"the GPU failed: {error}") from None


def packs_of(unit: Unit, without: frozenset[str], budget: int) -> Iterator[list[TokenSample]]:
    """The samples of each forward pass. The packs are the planned ones whatever is left out, so the rest keeps its bytes."""
    for pack in plan_packs([len(s.input_ids) for s in unit.samples], budget):
        samples = [unit.samples[i] for i in pack if unit.samples[i].sample_id not in without]
        if samples:
            yield samples


@torch.inference_mode()
def stored_aux(output: StageOutput, state_dtype: str) -> list[dict[str, Tensor]]:
    """Each aux layer that a stage owns, ascending, as it is stored: `aux` [T, H], `finite` [T], `aux_scale` [T, G] with float8."""
    layers = []
    for _, states_TH in sorted(output.aux.items()):
        stored = {"finite": states_TH.abs().amax(-1).isfinite()}
        if state_dtype == "float8":
            stored["aux"], stored["aux_scale"] = quantise(states_TH)
        else:
            stored["aux"] = states_TH.to(STATE_DTYPES[state_dtype])
        layers.append(stored)
    return layers


def joined_aux(layers: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """`aux` [T, 3H], `finite` [T] and `aux_scale` [T, 3G] of all aux layers, wherever they are."""
    joined = {"finite": torch.stack([layer["finite"] for layer in layers]).all(0)}
    for name in ("aux", "aux_scale"):
        if name in layers[0]:
            joined[name] = torch.cat([layer[name] for layer in layers], dim=1)
    return joined


@torch.inference_mode()
def stored_teacher(output: StageOutput, state_dtype: str) -> dict[str, Tensor]:
    """The last stage's `last` [S, H], `top1` [S] and `lse` [S] as they are stored, and `teacher_finite` [S]."""
    assert output.last_SH is not None and output.top1_S is not None and output.lse_S is not None
    finite_S = output.lse_S.isfinite() & (output.last_SH.abs().amax(-1).isfinite())
    last_SH = output.last_SH.to(last_dtype(state_dtype))
    return {"last": last_SH, "top1": output.top1_S, "lse": output.lse_S, "teacher_finite": finite_S}


def rows_of(samples: Sequence[TokenSample], host: dict[str, Tensor], not_finite: str) -> Iterator[Sample | Quarantined]:
    """Cut a pack's host tensors into samples; one with NaN or infinite states is set aside, for the reason `not_finite`."""
    t = s = 0
    for sample in samples:
        tokens, teaching = slice(t, t + len(sample.input_ids)), slice(s, s + sample.teaching)
        t, s = tokens.stop, teaching.stop
        if not (host["finite"][tokens].all() and host["teacher_finite"][teaching].all()):
            yield Quarantined(
                sample_id=sample.sample_id,
                source_id=sample.source_id,
                reason=not_finite,
            )
            continue
        yield Sample(
            sample.sample_id,
            sample.source_id,
            torch.tensor(sample.input_ids, dtype=torch.int32),
            torch.tensor(sample.loss_mask, dtype=torch.uint8),
            host["aux"][tokens],
            host["last"][teaching],
            host["top1"][teaching],
            host["lse"][teaching],
            host["aux_scale"][tokens] if "aux_scale" in host else None,
        )


class Shelf:
    """Where an actor puts what it captured; opens one attempt a unit."""

    def __init__(
        self,
        facts: TargetFacts,
        settings: ExtractConfig,
        folder: Folder,
        staging: Staging,
        name: str,
        not_finite: str = "the target's hidden states are NaN or infinite (another target.dtype than float16 may cure it)",
    ) -> None:
        self.facts, self.settings, self.folder, self.staging = facts, settings, folder, staging
        self.not_finite = not_finite
        self.counters = Counters("extract", name)

    def open(self, unit: Unit) -> "Shelved":
        return Shelved(self, unit)


class Shelved:
    """One unit on its way to the disk. Packs are written in the order of their numbers."""

    def __init__(self, shelf: Shelf, unit: Unit) -> None:
        self.shelf = shelf
        self.writer = ShardWriter(shelf.folder, unit.index, shelf.facts.hidden_size, shelf.settings.state_dtype)
        self._jobs: list[Future[None]] = []
        self._early: dict[int, Any] = {}
        self._next = 0
        self._ordering = threading.Lock()
        self._began = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eagle-write")

    def close(self) -> None:
        """Wait for what was put, and delete the attempt unless it is finished."""
        self._thread.shutdown()
        for _, fetched, _ in self._early.values():
            with fetched:
                pass
        self.writer.close()

    def put(
        self, number: int, samples: Sequence[TokenSample], teacher: dict[str, Tensor], layers: list[dict[str, Tensor]]
    ) -> None:
        """Queue a pack; waits for a free slot. Raises what went wrong with an earlier one.

        Aux layers are joined where they are; those that came to the host already meet the others there.
        """
        device = teacher["last"].device
        here = [layer for layer in layers if layer["aux"].device == device]
        arrived = [layer for layer in layers if layer["aux"].device != device]
        fetched = self.shelf.staging.fetch(teacher | (joined_aux(here) if here else {}))
        with self._ordering:
            self._early[number] = (samples, fetched, arrived)
            while self._next in self._early:
                self._jobs.append(self._thread.submit(self._write, *self._early.pop(self._next)))
                self._next += 1
            while self._jobs and self._jobs[0].done():
                self._jobs.pop(0).result()

    def finish(self) -> UnitRecord:
        assert not self._early, "a pack was never put"
        for job in self._jobs:
            job.result()
        record = self.writer.finish()
        seconds = time.monotonic() - self._began
        record.made_by |= made_by(self.shelf.staging.device) | {"seconds": round(seconds, 3)}
        self.shelf.counters.add(
            samples=len(record.rows), tokens=record.tokens, bytes=record.bytes, quarantined=len(record.quarantined)
        )
        self.shelf.counters.set(tokens_per_second=record.tokens / seconds)
        return record

    def _write(self, samples: Sequence[TokenSample], fetched: Fetched, arrived: list[dict[str, Tensor]]) -> None:
        with fetched as host:
            if arrived:
                own = {name: tensor for name, tensor in host.items() if name in AUX}
                host = host | joined_aux([*arrived, own] if own else arrived)
            for row in rows_of(samples, host, self.shelf.not_finite):
                if isinstance(row, Sample):
                    self.writer.add(row)
                else:
                    self.writer.quarantined.append(row)


def made_by(device: torch.device) -> dict[str, Any]:
    """Where an attempt was made, and the most memory that this took there so far, in bytes."""
    if device.type == "cuda":
        name, peak = torch.cuda.get_device_name(device), torch.cuda.max_memory_reserved(device)
    else:
        import resource

        name, peak = "cpu", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"host": socket.gethostname(), "device": name, "torch": torch.__version__, "peak_bytes": peak}
