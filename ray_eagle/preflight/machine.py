"""What the machine has: disk, memory, CPUs, ports, versions. Ends nothing, touches no CUDA."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ray_eagle.config import Config, ServeConfig
from ray_eagle.preflight.estimate import human_bytes
from ray_eagle.preflight.report import Finding
from ray_eagle.run import Folder
from ray_eagle.serving.listening import bindable

GIB = 1 << 30
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
TEMPORARY = Path(tempfile.gettempdir())


def gpu_demand(config: Config) -> tuple[float, list[str]]:
    """The most GPUs that one stage holds at a time, and the stages that ask for any."""
    demand = {
        "generate": config.generate.copies * config.generate.gpus,
        "extract": config.extract.actors * config.extract.stages * config.extract.gpus,
        "train": config.train.workers * float(config.train.use_gpu),
        "serve": config.serve.gpus,
    }
    return max(demand.values()), [stage for stage, count in demand.items() if count > 0]


def cpu_demand(config: Config) -> tuple[float, str]:
    """The most logical CPUs that one stage holds at a time, and which stage."""
    demand = {
        "generate": config.generate.copies * config.generate.cpus,
        "extract": config.extract.actors * config.extract.stages * config.extract.cpus,
        "train": config.train.workers * config.train.cpus_per_worker,
        "serve": config.serve.cpus,
    }
    stage = max(demand, key=lambda name: demand[name])
    return demand[stage], stage


def check_cpus(asked: float, stage: str, logical: float, threads: int) -> list[Finding]:
    """`logical`: CPUs that Ray counts; `threads`: those that this process may run on."""
    message = f"{stage} asks for {asked:g} logical CPUs; Ray counts {logical:g}, this machine has {threads} threads."
    if asked > logical:
        fix = f"Lower {stage}'s actors, workers or cpus, or add nodes (a private cluster: raise ray.num_cpus)."
        return [Finding(level="error", check="CPUs", message=message, fix=fix)]
    return [Finding(level="ok", check="CPUs", message=message)]


def cpu_threads() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_disk(run: Folder, needed: int | None, min_free_gib: float) -> list[Finding]:
    """Free disk at a local run folder against `needed` bytes (None: not known), with `min_free_gib` to remain."""
    coming = "an unknown amount" if needed is None else human_bytes(needed)
    existing = run.disk()
    if existing is None:
        return [
            Finding(
                level="ok",
                check="disk",
                message=f"{coming} will go to {run.path}; free space is not known.",
            )
        ]
    free = shutil.disk_usage(existing).free
    message = f"{coming} of hidden states to come, {human_bytes(free)} free at {existing}."
    if free - (needed or 0) < min_free_gib * GIB:
        message += f" {min_free_gib:g} GiB must remain."
        fix = "Put `run` on a larger disk, or lower generate.limit or extract.max_length."
        return [Finding(level="error", check="disk", message=message, fix=fix)]
    return [Finding(level="ok", check="disk", message=message)]


def check_nodes(
    free: Mapping[str, int], versions: Mapping[str, Mapping[str, str]], min_free_gib: float
) -> list[Finding]:
    """`free`: node -> bytes left on its temporary disk; `versions`: of what decides a result, this process's under ``."""
    findings = []
    for node, count in free.items():
        if count < min_free_gib * GIB:
            message = f"{node}: {human_bytes(count)} free at {TEMPORARY}, where Ray spills and kernels are cached."
            fix = "Free some, or start Ray with another --temp-dir."
            findings.append(Finding(level="warning", check="node disk", message=message, fix=fix))
    here = versions[""]
    for node, there in versions.items():
        if others := [f"{name} {there[name]} (here {here[name]})" for name in here if there[name] != here[name]]:
            message = f"{node}: other versions than here: {', '.join(others)}."
            fix = "Install the same on every node: results depend on them."
            findings.append(Finding(level="warning", check="versions", message=message, fix=fix))
    return findings


def available_memory() -> int:
    """Bytes of host memory that this process and its children can still take, container limits included."""
    if not Path("/proc/meminfo").exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(rows["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def check_memory(weights: int, copies: int, available: int, *, here: bool) -> list[Finding]:
    """Host memory against `copies` of the loaded target. `here`: the actors run on this machine, for certain."""
    message = f"{copies} x {human_bytes(weights)} of target weights, {human_bytes(available)} of host memory available"
    if weights * copies <= available:
        return [Finding(level="ok", check="host memory", message=message + ".")]
    message += "." if here else " on this node (others may have more)."
    fix = "Use fewer actors on the CPU, a smaller dtype, or a machine with more memory."
    return [Finding(level="error" if here else "warning", check="host memory", message=message, fix=fix)]


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """Variables that make measurements meaningless."""
    if SIMULATED not in environment:
        return []
    message = f"{SIMULATED}={environment[SIMULATED]} is set: SGLang would fake the acceptance that is to be measured."
    return [Finding(level="error", check="environment", message=message, fix=f"unset {SIMULATED}")]


def check_port(config: ServeConfig) -> list[Finding]:
    """serve.port can be bound; 0 takes a free one at the time. Raises ServingError."""
    if not config.port:
        return []
    bindable(config.host, config.port)
    return [Finding(level="ok", check="port", message=f"{config.host}:{config.port} is free.")]
