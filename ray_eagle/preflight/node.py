"""What preflight asks of every node, in one task pinned to it."""

import shutil
import sys
from dataclasses import dataclass

from ray_eagle import cluster
from ray_eagle.preflight.gpus import NodeGpus, inspect
from ray_eagle.preflight.kernels import KernelFacts, kernel_facts
from ray_eagle.preflight.machine import TEMPORARY


@dataclass(frozen=True)
class NodeFacts:
    """One node."""

    gpus: NodeGpus
    versions: dict[str, str]
    free_bytes: int
    """Of the temporary disk, where Ray spills and kernels are cached."""
    kernels: tuple[KernelFacts, ...]
    """Of each interpreter that will use its GPUs; empty without GPUs, or when no stage asks for one."""


def look(live_jobs: frozenset[str], interpreters: tuple[str, ...]) -> NodeFacts:
    """`interpreters`: whose kernels are to be read where there are GPUs, "" being the one that runs this."""
    gpus = inspect(live_jobs=live_jobs)
    asked = dict.fromkeys(name or sys.executable for name in interpreters) if gpus.gpus else {}
    return NodeFacts(
        gpus=gpus,
        versions=cluster.versions(),
        free_bytes=shutil.disk_usage(TEMPORARY).free,
        kernels=tuple(kernel_facts(name) for name in asked),
    )
