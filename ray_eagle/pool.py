"""A pool of actors that works through units, each exactly once, however often actors die.

The driver keeps up to two calls in flight per actor, gets metadata back (never tensors), gives a unit of a dead actor to
another, and replaces the dead. A unit that was running in three dying actors ends the run with its name; so do three
deaths in a constructor, with the error.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError

from ray_eagle.errors import EagleError, WorkerError

MAX_DEATHS_PER_UNIT = 3
MAX_CONSTRUCTOR_DEATHS = 3
IN_FLIGHT = 2


class ActorPool:
    """`make(name)` returns a handle of a new actor with a method `work(unit)`; at most `size` live at once."""

    def __init__(self, make: Callable[[str], Any], size: int, name: str) -> None:
        self._make = make
        self._size = size
        self._name = name
        self._made = 0
        self.deaths = 0
        """Actors that died while working."""

    def run(self, units: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (unit, result) as they finish. Units must be hashable. Raises WorkerError as the class says.

        An error that a unit raises itself (not a death) is raised here as it is, when it is ours.
        """
        waiting = deque(units)
        deaths: Counter[Any] = Counter()
        constructor_deaths = 0
        actors = [self._new() for _ in range(min(self._size, len(units)))]
        calls: dict[Any, tuple[Any, Any]] = {}
        try:
            while waiting or calls:
                for actor in actors:
                    while waiting and sum(owner is actor for owner, _ in calls.values()) < IN_FLIGHT:
                        unit = waiting.popleft()
                        calls[actor.work.remote(unit)] = (actor, unit)
                ready, _ = ray.wait(list(calls), num_returns=1)
                actor, unit = calls.pop(ready[0])
                try:
                    result = ray.get(ready[0])
                except RayActorError as error:
                    constructor_deaths += self._count_death(error, unit, deaths, constructor_deaths)
                    ray.kill(actor)  # one that is only out of reach must not keep its GPU
                    lost = [unit, *self._drop_calls(calls, actor)]
                    waiting.extendleft(reversed(lost))
                    actors = [self._new() if other is actor else other for other in actors]
                except RayTaskError as error:
                    if isinstance(error.cause, EagleError):
                        raise error.cause from None
                    raise
                else:
                    yield unit, result
        finally:
            for actor in actors:
                ray.kill(actor)

    def _new(self) -> Any:
        self._made += 1
        return self._make(f"{self._name}-{self._made}")

    def _count_death(self, error: RayActorError, unit: Any, deaths: Counter[Any], constructor_deaths: int) -> int:
        """1 if the actor died in its constructor. Raises WorkerError when a limit is reached."""
        if getattr(error, "actor_init_failed", False):
            if constructor_deaths + 1 >= MAX_CONSTRUCTOR_DEATHS:
                raise WorkerError(
                    f"{self._name}: {MAX_CONSTRUCTOR_DEATHS} actors failed to start. The last error: {error}"
                )
            return 1
        if isinstance(error, ActorDiedError | ActorUnavailableError):
            self.deaths += 1
            deaths[unit] += 1
        if deaths[unit] >= MAX_DEATHS_PER_UNIT:
            raise WorkerError(
                f"{self._name}: unit {unit} was running in {MAX_DEATHS_PER_UNIT} actors that died (killed from outside, or "
                f"out of memory). The last error: {error}. What was committed is kept: run the stage again to go on."
            )
        return 0

    @staticmethod
    def _drop_calls(calls: dict[Any, tuple[Any, Any]], actor: Any) -> list[Any]:
        """Forget the calls of a dead actor; their units, in order."""
        lost = [(ref, unit) for ref, (owner, unit) in calls.items() if owner is actor]
        for ref, _ in lost:
            del calls[ref]
        return [unit for _, unit in lost]
