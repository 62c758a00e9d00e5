"""The actors of a pool: made, handed units, replaced when they die. `ray_eagle.pool.blame` decides what a death means.

The driver keeps a few calls in flight per actor, gets metadata back (never tensors), gives the units of a dead actor to
others, and replaces it. A unit on trial takes the slot of the actor that died under it, while the others go on.

Three constructors that raise without a ready actor between end the run with the last error; so do six actors (or two a
slot) killed while starting without a ready one or a finished unit between, and at once an error of ours that a unit raises.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from ray_eagle.errors import EagleError, WorkerError, WorkerLost
from ray_eagle.metrics import Counters
from ray_eagle.pool.blame import Blame, Death, Job

MAX_FAILED_STARTS = 3
MAX_KILLED_STARTS = 6
NODE_NEWS_S = 75.0
WAKE_S = 1.0
AFTER_KILL_S = 30.0
DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, ActorUnschedulableError)


@dataclass(frozen=True)
class Member:
    """A new actor, and what gives back whatever belongs to it (a placement group)."""

    actor: Any
    """Handle with the methods `ready() -> str` (see `this_node`), `work(unit, without)` and, where units have samples,
    `trial(unit, i)`."""
    close: Callable[[], None] = lambda: None
    """Called once, after the actor was killed."""


def this_node() -> str:
    """Id of the node that this process runs on: what an actor's `ready` returns."""
    return str(ray.get_runtime_context().get_node_id())


@dataclass(frozen=True)
class _Call:
    job: Job | None
    """None: the call of `ready`."""
    sample: int | None = None
    """Index of the sample on trial; None: the whole unit."""


@dataclass(eq=False)
class _Worker:
    member: Member
    made: float
    nodes: frozenset[str]
    """Nodes that lived when it was made."""
    calls: dict[Any, _Call] = field(default_factory=dict)
    """By reference, in the order of submission."""
    node: str = ""
    """Where it is, once it is ready."""
    trying: Job | None = None
    trials: int = 0

    @property
    def units(self) -> int:
        return sum(call.job is not None for call in self.calls.values())

    @property
    def alone(self) -> bool:
        return any(call.job is not None and call.job.alone for call in self.calls.values())


class ActorPool:
    """`make(name)` returns a new Member; at most `size` live at once, each with `concurrency` calls running and one queued.

    `samples(unit)` names the samples of a unit, in the order of `trial`; None where units cannot be taken apart: three
    deaths of one then end the run.
    """

    def __init__(
        self,
        make: Callable[[str], Member],
        size: int,
        name: str,
        *,
        concurrency: int = 1,
        samples: Callable[[Any], list[str]] | None = None,
        node_news_s: float = NODE_NEWS_S,
        shortage: Callable[[], str | None] = lambda: None,
        patience_s: float = 120.0,
    ) -> None:
        self._make, self._size, self._name = make, size, name
        self._concurrency = concurrency
        self._shortage, self._patience_s = shortage, patience_s
        self._without_workers_since = time.monotonic()
        self._blame = Blame(name, samples, node_news_s, _alive)
        self._metrics = Counters(name.removeprefix("eagle-"), actor=name)
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()  # each needs a fresh actor
        self._held: list[Job] = []  # each needs its deaths settled
        self._workers: list[_Worker] = []
        self._where: Counter[str] = Counter()  # node -> deaths
        self._made = self._failed_starts = self._killed_starts = 0
        self.quarantined = self._blame.quarantined
        """Samples that were set aside: name -> why."""
        self.deaths = 0
        """Actors that died, or were out of reach and replaced."""
        self.retries = 0
        """Units that had to be given out again."""

    @property
    def node_deaths(self) -> int:
        """Of the deaths of actors that were ready, those whose node is known to be dead by now."""
        alive = _alive()
        return sum(count for node, count in self._where.items() if node not in alive)

    def run(self, units: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (unit, result) as they finish; once, and on every way out all actors are killed and closed.

        Raises WorkerError as above, and an EagleError that a unit raises as it is.
        """
        self._waiting = deque(Job(unit) for unit in units)
        left = len(units)
        try:
            while left:
                held, self._held = self._held, []
                for job in held:
                    self._place(job)
                self._staff()
                self._refuse_to_wait_in_vain()
                self._assign()
                self._metrics.set(queue=len(self._waiting) + len(self._suspects) + len(self._held))
                owners = {ref: worker for worker in self._workers for ref in worker.calls}
                if not owners:
                    time.sleep(WAKE_S)
                    continue
                ready, _ = ray.wait(list(owners), num_returns=1, timeout=WAKE_S)
                for ref in ready:
                    for unit, result in self._collect(owners[ref], ref):
                        left -= 1
                        yield unit, result
        finally:
            with ExitStack() as stack:  # each is ended, whatever another one's end raises
                for worker in self._workers:
                    stack.callback(_end, worker)

    def _refuse_to_wait_in_vain(self) -> None:
        """Raises WorkerError when no actor is ready and the cluster has become too small for any."""
        if any(worker.node for worker in self._workers):
            self._without_workers_since = time.monotonic()
        elif time.monotonic() > self._without_workers_since + self._patience_s and (lack := self._shortage()):
            raise WorkerError(f"{self._name}: no actor can be placed any more. {lack}")

    def _staff(self) -> None:
        """Fill the free slots while there is something to do, first with the fresh actors that trials need."""
        if self._suspects and len(self._workers) == self._size:
            for worker in self._workers:
                if not worker.calls and not worker.trying:
                    self._workers.remove(worker)
                    _end(worker)
                    break
        while len(self._workers) < self._size and self._short_of_actors():
            self._made += 1
            worker = _Worker(self._make(f"{self._name}-{self._made}"), time.monotonic(), _alive())
            self._workers.append(worker)
            worker.calls[worker.member.actor.ready.remote()] = _Call(None)
            if self._suspects:
                worker.trying = self._suspects.popleft()

    def _short_of_actors(self) -> bool:
        """Is there a trial without an actor, a unit that no idle one will take, or deaths that no newer actor can settle?"""
        idle = sum(worker.units == 0 and not worker.trying for worker in self._workers)
        newest = max((worker.made for worker in self._workers), default=0.0)
        return bool(
            self._suspects or len(self._waiting) > idle or any(job.deaths[-1].when > newest for job in self._held)
        )

    def _assign(self) -> None:
        """Hand out work: one trial at a time, units in breadth first so that few units reach many actors.

        Only to actors whose `ready` is here: queued behind it, a unit that kills at once takes its reply along (seen), and
        looks like a failed start.
        """
        for worker in self._workers:
            if worker.node and (job := worker.trying) and job.trial and not worker.units:
                if job.trial.todo:
                    sample = job.trial.todo[0]
                    worker.trials += 1
                    worker.calls[worker.member.actor.trial.remote(job.unit, sample)] = _Call(job, sample)
                else:
                    worker.trying = None
                    self._place(job)
        regular = [worker for worker in self._workers if worker.node and not worker.trying]
        if self._suspects:
            regular = regular[1:]  # the first runs dry and makes room for a fresh actor
        starting = sum(not worker.node for worker in self._workers)
        for depth in range(self._concurrency + 1):
            for worker in regular:
                spare = len(self._waiting) > (starting if depth >= self._concurrency else 0)
                if spare and worker.units == depth and not worker.alone and (job := self._next(alone=depth == 0)):
                    worker.calls[worker.member.actor.work.remote(job.unit, job.without)] = _Call(job)

    def _next(self, *, alone: bool) -> Job | None:
        """The next waiting unit for an actor; with `alone`, for one that has no other call."""
        for job in self._waiting:
            if alone or not job.alone:
                self._waiting.remove(job)
                return job
        return None

    def _collect(self, worker: _Worker, ref: Any) -> list[tuple[Any, Any]]:
        """The result of a finished call, if it is one of a unit; those of all calls of an actor that turns out dead."""
        if ref not in worker.calls:
            return []
        try:
            value = ray.get(ref)
        except RayTaskError as error:  # first: Ray makes it look like its cause, too
            if isinstance(error.cause, WorkerLost):
                return self._bury(worker, error.cause, error.cause)
            if isinstance(error.cause, EagleError):
                raise error.cause from None
            raise
        except DEATHS as error:
            return self._bury(worker, error)
        except ObjectLostError:  # the call succeeded, then its node died with the result
            call = worker.calls.pop(ref)
            self._give_back([call.job] if call.job and call.sample is None else [])
            return []
        return self._accept(worker, worker.calls.pop(ref), value)

    def _accept(self, worker: _Worker, call: _Call, value: Any) -> list[tuple[Any, Any]]:
        if call.job is None:
            worker.node = value
            self._blame.heard(value, worker.made)
            self._failed_starts = self._killed_starts = 0
        elif call.sample is None:
            self._killed_starts = 0  # some actor lives
            return [(call.job.unit, value)]
        elif call.job.trial:
            call.job.trial.passed()
        return []

    def _bury(self, worker: _Worker, error: Exception, lost: WorkerLost | None = None) -> list[tuple[Any, Any]]:
        """Remove a dead actor, blame what it was running, requeue; returns what it had finished before."""
        self._workers.remove(worker)
        _end(worker)  # one that is only out of reach must not keep its GPU
        self.deaths += 1
        self._metrics.add(deaths=1)
        ray.wait(list(worker.calls), num_returns=len(worker.calls), timeout=AFTER_KILL_S)
        finished, unfinished = [], []
        for ref, call in worker.calls.items():
            try:
                finished += self._accept(worker, call, ray.get(ref, timeout=0))
            except RayError:
                unfinished.append(call)
        jobs = [call.job for call in unfinished if call.job]
        alive = _alive()
        if not worker.node:
            self._count_start(worker, error, alive)
        else:
            death = Death((lost and lost.node) or worker.node, time.monotonic(), _short(error))
            self._where[death.node] += 1
            if death.node in alive:
                for job in jobs[: self._concurrency]:
                    self._blame.died(job, death, fresh=worker.trials == 1)
        if worker.trying:
            self._suspects.appendleft(worker.trying)
        else:
            self._give_back(jobs)
        return finished

    def _place(self, job: Job) -> None:
        """Put a unit where it belongs now: before all others, or on trial, or on hold. Raises WorkerError (see Blame)."""
        before = len(self.quarantined)
        queues = {"run": self._waiting.appendleft, "try": self._suspects.append, "wait": self._held.append}
        queues[self._blame.next(job)](job)
        self._metrics.add(quarantined=len(self.quarantined) - before)

    def _give_back(self, jobs: list[Job]) -> None:
        self.retries += len(jobs)
        self._metrics.add(retries=len(jobs))
        for job in reversed(jobs):
            self._place(job)

    def _count_start(self, worker: _Worker, error: Exception, alive: frozenset[str]) -> None:
        if getattr(error, "actor_init_failed", False):
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise WorkerError(
                    f"{self._name}: {self._failed_starts} actors failed to start. The last error: {error}"
                )
        elif worker.nodes <= alive:  # else a node died meanwhile, perhaps its own
            self._killed_starts += 1
            if self._killed_starts >= max(MAX_KILLED_STARTS, 2 * self._size):
                raise WorkerError(
                    f"{self._name}: {self._killed_starts} actors in a row were killed while starting (out of memory? Ask for "
                    f"fewer actors, or a smaller target.dtype). The last error: {error}"
                )


def _alive() -> frozenset[str]:
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _end(worker: _Worker) -> None:
    try:
        ray.kill(worker.member.actor)
    finally:
        worker.member.close()


def _short(error: Exception) -> str:
    """One line: Ray's errors may go on for a page."""
    return " ".join(str(error).split())[:500]
