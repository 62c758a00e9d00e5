"""How a stage tells what it is doing. Stages call a Progress; only the command line decides how it looks."""

import time
from typing import Protocol


class Progress(Protocol):
    """Receives the state of one running task."""

    def start(self, task: str, total: float, unit: str, done: float = 0) -> None:
        """A task begins, with `done` of `total` made earlier; in `unit` (prompts, samples, tokens, steps)."""

    def advance(self, amount: float, note: str = "") -> None:
        """So much more is done; `note` holds figures worth showing."""

    def say(self, message: str) -> None:
        """One line for the log: a decision, a warning, what was skipped."""


class Silent:
    """Shows nothing (tests, library use)."""

    def start(self, task: str, total: float, unit: str, done: float = 0) -> None: ...

    def advance(self, amount: float, note: str = "") -> None: ...

    def say(self, message: str) -> None: ...


class Rate:
    """Amount done, rate and time left since the start of a task; what was done before it does not count as fast."""

    def __init__(self, total: float, done: float = 0.0) -> None:
        self.total = total
        self.before = self.done = done
        self.began = time.monotonic()

    def advance(self, amount: float) -> None:
        self.done += amount

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def per_second(self) -> float:
        return (self.done - self.before) / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        rate = self.per_second
        return (self.total - self.done) / rate if rate > 0 else float("inf")
