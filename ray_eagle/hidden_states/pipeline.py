"""A target larger than one GPU: a pipeline of actors, each with its own layers, behind one actor that the pool sees.

Packs flow: several are on their way at once, so while one stage computes a pack, the next one is being copied to it and the
last one is being written. Between stages travels the residual stream, through host memory and Ray's object store; the aux
states go from the stage that owns their layer straight to the last one, which writes. The head of the pipeline submits the
whole chain of a pack ahead, so the calls that a GPU needs next are queued already. It never holds a tensor itself.
"""

import secrets
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from ray_eagle.cluster import marked
from ray_eagle.config import ExtractConfig, TargetConfig
from ray_eagle.errors import EagleError, WorkerLost
from ray_eagle.hidden_states.extractor import Shelf, Shelved, device_errors, packs_of, stored_aux, stored_teacher
from ray_eagle.hidden_states.plan import TokenSample, Unit
from ray_eagle.hidden_states.schema import STATE_DTYPES
from ray_eagle.hidden_states.shard import UnitRecord
from ray_eagle.hidden_states.staging import Staging
from ray_eagle.pool import this_node
from ray_eagle.run import Folder
from ray_eagle.target.capture import TokenPack
from ray_eagle.target.loading import TargetFacts, choose_dtype, take_device
from ray_eagle.target.stage import load_stage

THREADS = 3
"""Packs at one stage at once: one arriving, one computing, one leaving."""
AHEAD = 3
"""Packs on their way through a pipeline beyond one a stage."""
ANSWER_S = 10.0
"""A stage that does not say its node for so long, after an object of the pipeline was lost, is taken for the lost one."""
CONCURRENCY = 4
"""Units in work at once in one pipeline: a unit may be a few packs, and each is written by a thread of its own."""

Arrays = dict[str, np.ndarray]


class StageWorker:
    """One stage: some layers of the target on one device. Every method may be called from several threads."""

    def __init__(
        self,
        target: TargetConfig,
        facts: TargetFacts,
        settings: ExtractConfig,
        folder: Folder,
        layers: range,
        name: str,
    ) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # they are only read
        self.settings = settings
        self.device = take_device(settings.cpus, settings.gpus)
        self._dtypes = {
            "hidden": choose_dtype(target.dtype, self.device),
            "aux": STATE_DTYPES[settings.state_dtype],
        }
        self.stage = load_stage(facts, target, self.device, layers)
        self.computing = threading.Lock()
        # packs may reach the last stage out of order, and wait in their slots for the ones before
        slots = packs_on_their_way(settings.stages) + THREADS
        self.shelf = Shelf(facts, settings, folder, Staging(self.device, slots), name)
        self._arriving = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._open: dict[str, Shelved] = {}

    def ready(self) -> str:
        """The node that this actor runs on."""
        return this_node()

    def forward(self, samples: Sequence[TokenSample], hidden: list[Any] | None) -> tuple[list[Any], list[Any]]:
        """A pack's residual stream after this stage, and the aux states that it owns: each an object of host arrays.

        The references are in lists, so that Ray hands them on as they are: what they name is stored straight from the slot.
        """
        output, layers = self._compute(samples, hidden)
        assert output.hidden_TH is not None
        flat = {"hidden": output.hidden_TH} | {
            f"{name}.{i}": value for i, layer in enumerate(layers) for name, value in layer.items()
        }
        with self.shelf.staging.fetch(flat) as host:
            arrays = {name: _to_numpy(value) for name, value in host.items()}
            own = [{name: arrays[f"{name}.{i}"] for name in layer} for i, layer in enumerate(layers)]
            return [ray.put(arrays["hidden"])], [ray.put(own)]

    def open(self, attempt: str, unit: Unit) -> None:
        """Begin to write a unit (on the last stage)."""
        self._open[attempt] = self.shelf.open(unit)

    def store(
        self, attempt: str, number: int, samples: Sequence[TokenSample], hidden: list[Any] | None, *earlier: list[Any]
    ) -> None:
        """Finish pack `number` of an attempt and write it, with the aux states of the earlier stages."""
        output, own = self._compute(samples, hidden)
        arrived: list[list[Arrays]] = ray.get([reference for [reference] in earlier])
        layers = [
            {name: self._tensor(name, value) for name, value in layer.items()} for part in arrived for layer in part
        ]
        self._open[attempt].put(number, samples, stored_teacher(output, self.settings.state_dtype), [*layers, *own])

    def finish(self, attempt: str) -> UnitRecord:
        """The record of an attempt whose packs are all stored."""
        shelved = self._open.pop(attempt)
        try:
            return shelved.finish()
        finally:
            shelved.close()

    def abandon(self, attempt: str) -> None:
        """Forget an attempt, its file too."""
        if shelved := self._open.pop(attempt, None):
            shelved.close()

    def trial(self, samples: Sequence[TokenSample], hidden: list[Any] | None, *earlier: list[Any]) -> None:
        """Finish a pack and forget it."""
        output, _ = self._compute(samples, hidden)
        with self.shelf.staging.fetch(stored_teacher(output, self.settings.state_dtype)):
            pass

    def _compute(self, samples: Sequence[TokenSample], hidden: list[Any] | None) -> tuple[Any, list[dict[str, Tensor]]]:
        pack = TokenPack.of([(s.input_ids, s.loss_mask) for s in samples])
        hidden_TH = None if hidden is None else self._upload(ray.get(hidden[0]))
        with device_errors(self.settings.tokens_per_batch), self.computing:
            output = self.stage.run(pack, hidden_TH)
            return output, stored_aux(output, self.settings.state_dtype)

    def _upload(self, array: np.ndarray) -> Tensor:
        """To the device, on a stream of its own: the device goes on computing meanwhile."""
        tensor = self._tensor("hidden", array)
        if self._arriving is None:
            return tensor
        with torch.cuda.stream(self._arriving):
            moved = tensor.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._arriving)
        moved.record_stream(current)
        return moved

    def _tensor(self, name: str, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.view(self._dtypes.get(name, tensor.dtype))


def packs_on_their_way(stages: int) -> int:
    """Packs that may be anywhere between the head of a pipeline and the thread that writes them."""
    return stages + AHEAD


class Pipeline:
    """The head of a pipeline: creates the stages in its own placement group, one bundle each, and sends packs through them."""

    def __init__(
        self,
        target: TargetConfig,
        facts: TargetFacts,
        settings: ExtractConfig,
        folder: Folder,
        split: list[range],
        name: str,
    ) -> None:
        self.settings = settings
        self.feeding = threading.Lock()
        self.room = threading.Semaphore(packs_on_their_way(len(split)))
        group = get_current_placement_group()
        actor = ray.remote(StageWorker)
        self.stages = [
            actor.options(
                name=f"{name}-stage-{i}",
                num_cpus=settings.cpus,
                num_gpus=settings.gpus,
                **marked(settings.gpus),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote(target, facts, settings, folder, layers, f"{name}-stage-{i}")
            for i, layers in enumerate(split)
        ]
        self.nodes = [""] * len(split)

    def ready(self) -> str:
        """The node that the pipeline's head runs on, once every stage is ready. Raises WorkerLost when one died."""
        try:
            self.nodes = ray.get([stage.ready.remote() for stage in self.stages])
        except RayError as error:
            raise self._explained(error, "") from None
        return this_node()

    def work(self, unit: Unit, without: frozenset[str] = frozenset()) -> UnitRecord:
        """Send a unit through; returns the record that would commit it. Raises WorkerLost when a stage died."""
        attempt, last = secrets.token_hex(4), self.stages[-1]
        on_their_way: deque[Any] = deque()

        def arrived() -> None:
            """Wait for the earliest pack, in order: a later one keeps its place until those before it are through."""
            ray.get(on_their_way[0])
            on_their_way.popleft()
            self.room.release()

        try:
            ray.get(last.open.remote(attempt, unit))
            with self.feeding:
                for number, samples in enumerate(packs_of(unit, without, self.settings.tokens_per_batch)):
                    while not self.room.acquire(blocking=not on_their_way):
                        arrived()
                    hidden, aux = self._through(samples)
                    on_their_way.append(last.store.remote(attempt, number, samples, hidden, *aux))
            while on_their_way:
                arrived()
            return ray.get(last.finish.remote(attempt))
        except RayError as error:
            raise self._explained(error, attempt) from None
        finally:
            for _ in on_their_way:
                self.room.release()

    def trial(self, unit: Unit, index: int) -> None:
        """Send one sample of a unit through alone, and forget it: does it kill a stage?"""
        samples = [unit.samples[index]]
        try:
            hidden, aux = self._through(samples)
            ray.get(self.stages[-1].trial.remote(samples, hidden, *aux))
        except RayError as error:
            raise self._explained(error, "") from None

    def _through(self, samples: Sequence[TokenSample]) -> tuple[Any, list[Any]]:
        """References to what reaches the last stage: the residual stream, and each earlier stage's aux states."""
        hidden, aux = None, []
        for stage in self.stages[:-1]:
            hidden, own = stage.forward.options(num_returns=2).remote(samples, hidden)
            aux.append(own)
        return hidden, aux

    def _explained(self, error: Exception, attempt: str) -> Exception:
        """Our own error as it is, after its attempt is cleared away; anything that Ray lost as WorkerLost."""
        cause = error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, RayError):
            lost = next((i for i, stage in enumerate(self.stages) if not _answers(stage)), None)
            node = self.nodes[lost] if lost is not None else ""
            which = f"stage {lost} of {len(self.stages)}" if lost is not None else "a stage"
            return WorkerLost(f"{which} died: {cause}", node=node)
        ray.wait([self.stages[-1].abandon.remote(attempt)])
        return cause if isinstance(cause, EagleError) else error


def _answers(stage: Any) -> bool:
    try:
        ray.get(stage.ready.remote(), timeout=ANSWER_S)
    except RayError:
        return False
    return True


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """Its bits as numpy knows them, which has neither bfloat16 nor 8-bit floats; a view."""
    bits = (
        {2: torch.uint16, 1: torch.uint8}[tensor.itemsize]
        if tensor.is_floating_point() and tensor.itemsize < 4
        else tensor.dtype
    )
    return tensor.view(bits).numpy()
