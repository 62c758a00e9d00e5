"""How progress looks: a bar on a terminal, a line every few seconds in a job's log. Everything goes to stderr."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ray_eagle.progress import Rate

LINE_EVERY_S = 5.0


class TerminalProgress:
    """Bars with rate and time left, and messages above them."""

    def __init__(self, console: Console) -> None:
        self.bars = Bars(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self.bars.start()
        self.task: TaskID | None = None

    def start(self, task: str, total: float, unit: str, done: float = 0) -> None:
        self._finish()
        self.task = self.bars.add_task(task, total=total, completed=int(done), unit=unit, note="")

    def advance(self, amount: float, note: str = "") -> None:
        if self.task is not None:
            self.bars.update(self.task, advance=amount, note=note)

    def say(self, message: str) -> None:
        self.bars.console.print(message, highlight=False, markup=False)

    def close(self) -> None:
        self._finish()
        self.bars.stop()

    def _finish(self) -> None:
        """The bar of a task that is over stays, with its time standing still."""
        if self.task is not None:
            self.bars.stop_task(self.task)
            self.task = None


class LogProgress:
    """Plain lines: at most one every few seconds, and one when a task is complete."""

    def __init__(self) -> None:
        self.rate = Rate(0)
        self.name = self.unit = ""
        self.last = 0.0

    def start(self, task: str, total: float, unit: str, done: float = 0) -> None:
        self.rate, self.name, self.unit, self.last = Rate(total, done), task, unit, time.monotonic()

    def advance(self, amount: float, note: str = "") -> None:
        self.rate.advance(amount)
        now = time.monotonic()
        if now - self.last < LINE_EVERY_S and self.rate.done < self.rate.total:
            return
        self.last = now
        left = self.rate.seconds_left
        eta = f"eta {left:.0f} s" if left != float("inf") else "eta unknown"
        line = f"{self.name}: {self.rate.done:,.0f} of {self.rate.total:,.0f} {self.unit}, {self.rate.seconds:.0f} s, {eta}"
        self.say(f"{line}, {note}" if note else line)

    def say(self, message: str) -> None:
        sys.stderr.write(message + "\n")
        sys.stderr.flush()

    def close(self) -> None: ...
