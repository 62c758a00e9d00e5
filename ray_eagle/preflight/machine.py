"""What the machine has: disk, memory, CPUs, GPUs and who uses them, ports. Ends nothing, touches no CUDA."""

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ray_eagle.config import Config, ServeConfig
from ray_eagle.preflight.estimate import human_bytes
from ray_eagle.preflight.report import Finding
from ray_eagle.run import Folder

GIB = 1 << 30
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    name: str
    bytes: int | None
    """GPU memory; None where the driver does not say."""


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    used: int
    total: int
    processes: tuple[GpuProcess, ...]


def list_gpus() -> list[Gpu]:
    """The GPUs of this machine and their compute processes, from the driver (NVML); none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            processes = tuple(GpuProcess(p.pid, _process_name(p.pid), p.usedGpuMemory) for p in running)
            name = pynvml.nvmlDeviceGetName(handle)
            text = name.decode() if isinstance(name, bytes) else name
            gpus.append(Gpu(index, text, memory.used, memory.total, processes))
        return gpus
    finally:
        pynvml.nvmlShutdown()


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # of another user's namespace, or just ended
        return "unknown"


def check_gpus(gpus: Mapping[str, list[Gpu]], asked: float, stages: list[str]) -> list[Finding]:
    """`gpus`: node -> its GPUs; `asked`: the most that a stage of `stages` needs at a time. Ends nothing."""
    findings = []
    for node, listed in gpus.items():
        for gpu in listed:
            held = [f"pid {p.pid} {p.name} {human_bytes(p.bytes) if p.bytes else 'unknown'}" for p in gpu.processes]
            where = f"{node} GPU {gpu.index}" if node else f"GPU {gpu.index}"
            message = f"{where}, {gpu.name}: {human_bytes(gpu.used)} of {human_bytes(gpu.total)} used"
            findings.append(
                Finding(
                    level="warning" if held else "ok",
                    check="GPUs",
                    message=f"{message} by {'; '.join(held)}." if held else f"{message}, no process on it.",
                    fix="Leave them, or end them yourself if nobody needs them; preflight never does." if held else "",
                )
            )
    count = sum(len(listed) for listed in gpus.values())
    if count < asked:
        message = f"{', '.join(stages)} ask for {asked:g} at the same time, found {count}."
        fix = "Run on machines with GPUs, or set the gpus of these stages to 0 (train.use_gpu to false)."
        findings.append(Finding(level="error", check="GPUs", message=message, fix=fix))
    elif not count:
        findings.append(Finding(level="ok", check="GPUs", message="none, and no stage asks for one."))
    return findings


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


def check_disk(run: Folder, needed: int, min_free_gib: float) -> list[Finding]:
    """Free disk at a local run folder against `needed` bytes, with `min_free_gib` to remain."""
    if not run.is_local:
        return [
            Finding(
                level="ok",
                check="disk",
                message=f"{human_bytes(needed)} will go to {run.path}; free space is not known.",
            )
        ]
    existing = next(p for p in (Path(run.path), *Path(run.path).parents) if p.exists())
    free = shutil.disk_usage(existing).free
    message = f"{human_bytes(needed)} of hidden states to come, {human_bytes(free)} free at {existing}."
    if free - needed < min_free_gib * GIB:
        message += f" {min_free_gib:g} GiB must remain."
        fix = "Put `run` on a larger disk, or lower generate.limit or extract.max_length."
        return [Finding(level="error", check="disk", message=message, fix=fix)]
    return [Finding(level="ok", check="disk", message=message)]


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
    """serve.port can be bound; 0 takes a free one at the time."""
    if not config.port:
        return []
    try:
        socket.create_server((config.host, config.port)).close()
    except OSError as error:
        message = f"serve.host {config.host}, serve.port {config.port}: cannot be bound ({error.strerror})."
        return [
            Finding(level="error", check="port", message=message, fix="Choose another serve.port, or 0 for a free one.")
        ]
    return [Finding(level="ok", check="port", message=f"{config.host}:{config.port} is free.")]
