"""What preflight asks of every node, in one task pinned to it."""

import shutil
import sys
from dataclasses import dataclass

from ray_eagle import stage
from ray_eagle.config import ServeConfig
from ray_eagle.preflight.gpus import NodeGpus, inspect
from ray_eagle.preflight.kernels import ASK_S, KernelFacts, kernel_facts
from ray_eagle.preflight.machine import TEMPORARY
from ray_eagle.serving.server import child_environment

INTERPRETERS = 2
"""At most so many are asked: this one, and the one of a server in a child process."""
LOOK_S = INTERPRETERS * ASK_S + 60
"""Longest look at a node, the start of a process there included."""


@dataclass(frozen=True)
class NodeFacts:
    """One node."""

    gpus: NodeGpus
    versions: dict[str, str]
    free_bytes: int
    """Of the temporary disk, where Ray spills and kernels are cached."""
    kernels: tuple[KernelFacts, ...]
    """Of each interpreter that will use its GPUs; empty without GPUs, or when no stage asks for one."""


def look(live_jobs: frozenset[str], serve: ServeConfig, stages: bool) -> NodeFacts:
    """`stages`: some stage runs on GPUs in this interpreter; a server in a child process has one of its own."""
    gpus = inspect(live_jobs=live_jobs)
    asked: list[tuple[str, dict[str, str] | None]] = [(sys.executable, None)] if stages else []
    if serve.engine != "reference" and serve.gpus and (serve.python or serve.env or not asked):
        asked.append((serve.python or sys.executable, child_environment(serve)))
    return NodeFacts(
        gpus=gpus,
        versions=stage.versions(),
        free_bytes=shutil.disk_usage(TEMPORARY).free,
        kernels=tuple(kernel_facts(name, environment) for name, environment in asked) if gpus.gpus else (),
    )
