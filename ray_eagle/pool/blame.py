"""Who is to blame when actors die: no Ray in here, only what the pool saw and when.

- Only the calls that an actor was running count, not those queued behind them; none is handed out before it is `ready`.
  A unit blamed once shares an actor with no other: the first blame may be wrong (a reply lost with the process that had
  just sent it; a second unit running beside the guilty one), the next are not.
- The death of a node counts against nobody. Ray learns of it late (measured: 15 s after a raylet is killed, 65 s after a
  machine freezes; the driver sees its actors out of reach within 2 s), so a death is *settled* only when an actor
  made after it is ready on that node, or `news_s` later when the node still lives.
- A unit blamed for three deaths is put on trial: its samples run one by one on a fresh actor. A sample that kills three
  fresh actors, settled, and never succeeds between is a killer: the unit runs without it. What a trial returns is thrown
  away; a unit is always made by `work`, so its bytes hang on no death.
- A unit that is blamed for three deaths, acquitted sample by sample, and blamed for three more, ends the run with its name.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_eagle.errors import WorkerError

MAX_DEATHS = 3
"""Of a unit before it goes on trial, and of a sample, alone on fresh actors, before it is set aside."""

Next = Literal["run", "try", "wait"]
"""What is to happen to a unit: be run, be tried on a fresh actor, or wait until its deaths are settled."""


@dataclass(frozen=True)
class Death:
    """Of an actor that was ready."""

    node: str
    when: float
    """When the driver saw it."""
    error: str


@dataclass
class Trial:
    """A unit taken apart."""

    todo: deque[int]
    """Indices of the samples that are still to be tried; the first one is running."""
    deaths: dict[int, list[Death]]
    """Sample -> deaths of fresh actors; forgotten when it succeeds."""

    def passed(self) -> None:
        """The running sample did no harm."""
        self.deaths.pop(self.todo.popleft(), None)


@dataclass(eq=False)
class Job:
    """A unit and its history."""

    unit: Any
    deaths: list[Death] = field(default_factory=list)
    without: frozenset[str] = frozenset()
    """Its samples that were set aside."""
    trial: Trial | None = None
    acquitted: bool = False

    @property
    def alone(self) -> bool:
        """Blamed before: it shares an actor with no other unit, so that a further death is surely its own."""
        return self.acquitted or bool(self.deaths)


class Blame:
    """Counts deaths and decides what becomes of units.

    `samples(unit)` names the samples of a unit, None where units cannot be taken apart; `alive()` are the ids of the nodes
    that live as far as Ray knows; `clock()` counts seconds.
    """

    def __init__(
        self,
        name: str,
        samples: Callable[[Any], list[str]] | None,
        news_s: float,
        alive: Callable[[], frozenset[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._samples, self._news_s, self._alive, self._clock = name, samples, news_s, alive, clock
        self._heard: dict[str, float] = {}
        self.quarantined: dict[str, str] = {}
        """Samples that were set aside, and why."""

    def heard(self, node: str, made: float) -> None:
        """An actor made at that time is ready on the node."""
        self._heard[node] = max(made, self._heard.get(node, made))

    def died(self, job: Job, death: Death, *, fresh: bool) -> None:
        """An actor died while it was running the job; `fresh`: it had run nothing before."""
        if job.trial is None:
            job.deaths.append(death)
        elif fresh:  # a sample that dies on a used actor is tried again on a fresh one
            sample = job.trial.todo[0]
            job.trial.deaths[sample] = self._standing([*job.trial.deaths.get(sample, []), death])
            if len(job.trial.deaths[sample]) >= MAX_DEATHS:
                job.trial.todo.popleft()

    def next(self, job: Job) -> Next:
        """What is to happen to a job that is not running. Raises WorkerError for one that dies as a whole."""
        if job.trial:
            return self._judge(job, job.trial)
        job.deaths = self._standing(job.deaths)
        if len(job.deaths) < MAX_DEATHS:
            return "run"
        if self._samples and not job.acquitted:
            names = self._samples(job.unit)
            job.trial = Trial(deque(i for i, name in enumerate(names) if name not in job.without), {})
            return "try"
        if not self._settled(job.deaths):
            return "wait"
        why = "killed from outside, or out of memory"
        if job.acquitted:
            why = "it dies as a whole, but each of its samples survives alone: out of memory? Lower extract.tokens_per_batch"
        raise WorkerError(
            f"{self._name}: unit {job.unit} was running in {MAX_DEATHS} actors that died ({why}). The last error: "
            f"{job.deaths[-1].error}. What was committed is kept: run the stage again to go on."
        )

    def _judge(self, job: Job, trial: Trial) -> Next:
        if trial.todo:
            return "try"
        trial.deaths = {sample: self._standing(deaths) for sample, deaths in trial.deaths.items()}
        trial.todo.extend(sample for sample, deaths in trial.deaths.items() if len(deaths) < MAX_DEATHS)
        if trial.todo:
            return "try"
        if not all(self._settled(deaths) for deaths in trial.deaths.values()):
            return "wait"
        names = self._samples(job.unit) if self._samples else []
        for sample, deaths in trial.deaths.items():
            why = f"killed {MAX_DEATHS} fresh actors, each alone in it. The last error: {deaths[-1].error}"
            self.quarantined[names[sample]] = why
        job.without |= {names[sample] for sample in trial.deaths}
        job.acquitted = not trial.deaths
        job.deaths, job.trial = [], None
        return "run"

    def _standing(self, deaths: list[Death]) -> list[Death]:
        """Without those whose node is known to be dead by now."""
        alive = self._alive()
        return [death for death in deaths if death.node in alive]

    def _settled(self, deaths: list[Death]) -> bool:
        """Is it known that these actors died on nodes that lived on? (Those on dead nodes are not among them.)"""
        now = self._clock()
        return all(d.when < self._heard.get(d.node, d.when) or now > d.when + self._news_s for d in deaths)
