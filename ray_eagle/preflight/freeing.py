"""Ending what was left on GPUs, and waiting until the memory is really free: the driver lags behind the processes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from ray_eagle import cluster
from ray_eagle.errors import ConfigError, InputError, WorkerError
from ray_eagle.preflight.gpus import IDLE_BYTES, Holder, NodeGpus, ReadDriver, inspect, nvml
from ray_eagle.preflight.processes import PROC, Outcome, Process, end

POLL_S = 0.2
STEADY_S = 4.0
"""Memory that nobody counts is taken for settled when it has not changed for so long."""
MEMORY_S = 20.0
"""Longest wait for the driver to give memory back."""


@dataclass(frozen=True)
class Freed:
    """What freeing a node did, and what is left on it."""

    outcomes: tuple[tuple[Process, Outcome], ...]
    before: tuple[int, ...]
    """Bytes in use on each GPU."""
    seconds: float
    """Until the processes were gone and the memory was settled."""
    left: NodeGpus


def stale(node: NodeGpus) -> list[Holder]:
    """What `--free-gpus` ends unasked: processes of ours that nothing needs any more."""
    found = {h.process.pid: h for gpu in node.gpus for h in gpu.holders if h.standing.stale}
    return list((found | {h.process.pid: h for h in node.left_behind}).values())


def named(nodes: Mapping[str, NodeGpus], names: Sequence[str]) -> dict[str, list[Holder]]:
    """node -> its processes among `names`, each `PID`, or `HOST:PID` where several nodes have that pid on a GPU.

    Raises ConfigError for what is no pid, InputError when no process with it is on a GPU, or on more than one node.
    """
    chosen: dict[str, list[Holder]] = {}
    for name in names:
        host, _, text = name.rpartition(":")
        if not text.isdigit():
            raise ConfigError(
                f"--pid {name}: expected PID or HOST:PID, found {text!r}. Take it from the list of preflight."
            )
        found = [
            (key, holder)
            for key, node in nodes.items()
            if host in ("", node.host)
            for holder in {h.process.pid: h for gpu in node.gpus for h in gpu.holders}.values()
            if holder.process.pid == int(text)
        ]
        if len(found) != 1:
            where = ", ".join(nodes[key].host for key, _ in found) or "none"
            fix = (
                "Say HOST:PID."
                if found
                else "Only processes that hold a GPU are ended; `ray-eagle preflight --gpus` lists them."
            )
            raise InputError(f"--pid {name}: expected one process on a GPU with this pid, found it on: {where}. {fix}")
        key, holder = found[0]
        chosen.setdefault(key, []).append(holder)
    return chosen


def free(
    targets: Sequence[Process],
    *,
    read: ReadDriver = nvml,
    proc: Path = PROC,
    live_jobs: frozenset[str] = frozenset(),
    term_s: float = 10.0,
    kill_s: float = 10.0,
    memory_s: float = MEMORY_S,
) -> Freed:
    """End these processes of this node, and wait until its GPUs have given their memory back."""
    began = time.monotonic()
    before = inspect(read, proc, live_jobs)
    outcomes = end(targets, term_s=term_s, kill_s=kill_s, proc=proc)
    gone = {pid for pid, outcome in outcomes.items() if outcome in ("ended", "killed")}
    goals = [_goal(gpu.reading.used, gpu.holders, gone) for gpu in before.gpus]
    if gone and goals:
        _await_memory(lambda: [gpu.used for gpu in read().gpus], goals, memory_s)
    return Freed(
        outcomes=tuple((target, outcomes[target.pid]) for target in targets),
        before=tuple(gpu.reading.used for gpu in before.gpus),
        seconds=time.monotonic() - began,
        left=inspect(read, proc, live_jobs),
    )


def _goal(used: int, holders: Sequence[Holder], gone: set[int]) -> int | None:
    """At most so many bytes must be in use once `gone` are; None when nobody can say, and the wait is for steadiness."""
    mine = [h for h in holders if h.process.pid in gone]
    if not mine:
        return used + IDLE_BYTES  # nothing of it was to be freed
    if any(h.bytes is None for h in mine):
        return None
    return used - sum(h.bytes or 0 for h in mine) + IDLE_BYTES


def _await_memory(used: Callable[[], list[int]], goals: Sequence[int | None], seconds: float) -> None:
    """Until every GPU is at its goal, or where it has none, idle or unchanged for STEADY_S."""
    deadline = time.monotonic() + seconds
    last, since = used(), time.monotonic()
    while time.monotonic() < deadline:
        now = used()
        if now != last:
            last, since = now, time.monotonic()
        steady = time.monotonic() - since >= STEADY_S
        reached = [
            n <= (IDLE_BYTES if goal is None else goal) or (goal is None and steady)
            for n, goal in zip(now, goals, strict=True)
        ]
        if all(reached):
            return
        time.sleep(POLL_S)


def look_at_nodes() -> dict[str, NodeGpus]:
    """Every node of the joined cluster, by its Ray id. Raises WorkerError for one that does not answer."""
    nodes = [_value(answer) for answer in cluster.on_every_node(_look, cluster.live_jobs())]
    return {node.node_id: node for node in nodes}


def free_nodes(targets: Mapping[str, Sequence[Process]]) -> dict[str, Freed]:
    """`free` on each of these nodes, by Ray id, all at the same time. Raises WorkerError as `look_at_nodes`."""
    if not targets:
        return {}
    chosen = {node: tuple(each) for node, each in targets.items()}
    answers = [_value(answer) for answer in cluster.on_every_node(_free, chosen, cluster.live_jobs())]
    return {freed.left.node_id: freed for freed in answers if freed}


def _look(live_jobs: frozenset[str]) -> NodeGpus:
    return inspect(live_jobs=live_jobs)


def _free(targets: Mapping[str, Sequence[Process]], live_jobs: frozenset[str]) -> Freed | None:
    mine = targets.get(ray.get_runtime_context().get_node_id())
    return free(mine, live_jobs=live_jobs) if mine else None


def _value(answer: cluster.NodeAnswer) -> Any:
    if answer.error:
        raise WorkerError(
            f"GPUs of {answer.node}: expected an answer, found: {answer.error}. Check that ray_eagle runs there."
        )
    return answer.value
