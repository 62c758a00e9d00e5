"""The GPUs of a node and everybody on them: the driver's word (NVML) held against /proc.

NVML counts memory rightly but cannot name processes of another container, and from inside one it may name them by the
host's pids, which here belong to others. So a pid of NVML's counts only where that process has GPU device files open;
device files also show whom NVML keeps quiet about; and memory that nobody visible accounts for is reported as such.
"""

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

from ray_eagle.preflight.estimate import human_bytes
from ray_eagle.preflight.processes import PROC, Process, RayFacts, Standing, recorded_replicas, scan, standing
from ray_eagle.preflight.report import Finding

IDLE_BYTES = 600 * 2**20
"""What a GPU without processes may show as used."""
COMMAND_SHOWN = 120
ON_THE_HOST = (
    "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv; then ps -o user,lstart,args -p PID"
)


@dataclass(frozen=True)
class GpuReading:
    """One GPU by the driver's word."""

    index: int
    minor: int
    """N of /dev/nvidiaN."""
    name: str
    total: int
    used: int
    capability: tuple[int, int]
    """Compute capability: (9, 0) is sm_90."""
    processes: tuple[tuple[int, int | None], ...] = ()
    """(pid, bytes) as the driver counts; None where it does not say."""


@dataclass(frozen=True)
class DriverReading:
    """All that the driver of a node says."""

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA that it runs."""
    gpus: tuple[GpuReading, ...] = ()


ReadDriver = Callable[[], DriverReading]


@dataclass(frozen=True)
class Holder:
    """A process on a GPU, or one of ours that was left behind."""

    process: Process
    bytes: int | None
    """GPU memory; None where the driver does not say."""
    standing: Standing


@dataclass(frozen=True)
class Gpu:
    """One GPU and everybody on it."""

    reading: GpuReading
    holders: tuple[Holder, ...]
    outside: tuple[int, ...]
    """Pids that only the driver sees: processes of other containers or users, by the host's counting."""
    nobodys: int
    """Bytes in use beyond what visible processes account for; 0 when that cannot be told."""


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of one node."""

    node_id: str
    host: str
    driver: DriverReading
    gpus: tuple[Gpu, ...]
    left_behind: tuple[Holder, ...]
    """Stale processes of ours that hold no GPU memory themselves, such as the launcher of a server."""
    unreadable: int
    """Processes whose open files could not be listed (of other users, when this is not root)."""


def nvml() -> DriverReading:
    """The driver's word; nothing without a driver. Touches no CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return DriverReading()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        gpus = tuple(_read_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
        return DriverReading(_text(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), gpus)
    finally:
        pynvml.nvmlShutdown()


def inspect(read: ReadDriver = nvml, proc: Path = PROC, live_jobs: frozenset[str] = frozenset()) -> NodeGpus:
    """Everybody on the GPUs of this node, and what we left behind on it.

    `live_jobs`: of the cluster whose task this is (`cluster.live_jobs`). Ends nothing.
    """
    joined = ray.is_initialized()
    raylet = int(os.environ.get("RAY_RAYLET_PID", 0)) if joined else 0
    node_id = ray.get_runtime_context().get_node_id() if joined else ""
    return account(
        read(), scan(proc), RayFacts(raylet, live_jobs, recorded_replicas(Path(tempfile.gettempdir()))), node_id
    )


def account(driver: DriverReading, processes: Mapping[int, Process], ray: RayFacts, node_id: str = "") -> NodeGpus:
    """Hold the driver's word against the processes of /proc."""
    named = {pid for gpu in driver.gpus for pid, _ in gpu.processes if _on_gpus(processes.get(pid))}
    gpus = []
    for reading in driver.gpus:
        counted = {pid: size for pid, size in reading.processes if pid in named}
        # a process that the driver names anywhere is where the driver says: device files are open beyond that
        quiet = [p.pid for p in processes.values() if p.cuda and reading.minor in p.devices and p.pid not in named]
        holders = tuple(
            Holder(processes[pid], counted.get(pid), standing(processes[pid], processes, ray))
            for pid in sorted({*counted, *quiet})
        )
        outside = tuple(sorted(pid for pid, _ in reading.processes if pid not in named))
        rest = reading.used - sum(holder.bytes or 0 for holder in holders)
        uncounted = any(holder.bytes is None for holder in holders)
        gpus.append(Gpu(reading, holders, outside, 0 if uncounted or rest <= IDLE_BYTES else rest))
    on_gpus = {holder.process.pid for gpu in gpus for holder in gpu.holders}
    owned = (p for p in processes.values() if p.owned and p.pid not in on_gpus)
    left = tuple(h for p in owned if (h := Holder(p, 0, standing(p, processes, ray))).standing.stale)
    unreadable = sum(not p.readable for p in processes.values())
    return NodeGpus(node_id, socket.gethostname(), driver, tuple(gpus), left, unreadable)


def describe(holder: Holder) -> str:
    """`pid 41 (root, 3 h, 81 GB) python -m sglang: ours, left behind: its Ray cluster is gone`."""
    process = holder.process
    memory = "memory not said" if holder.bytes is None else human_bytes(holder.bytes)
    command = process.command if len(process.command) <= COMMAND_SHOWN else process.command[:COMMAND_SHOWN] + "…"
    return (
        f"pid {process.pid} ({process.user}, {human_age(process.age_s)}, {memory}) {command}: {holder.standing.reason}"
    )


def human_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def check_gpus(nodes: Mapping[str, NodeGpus], asked: float, stages: list[str]) -> list[Finding]:
    """`nodes`: name -> its GPUs; `asked`: the most that a stage of `stages` needs at a time."""
    findings = [finding for name, node in nodes.items() for finding in _check_node(name, node)]
    count = sum(len(node.gpus) for node in nodes.values())
    if count < asked:
        message = f"{', '.join(stages)} ask for {asked:g} at the same time, found {count}."
        fix = "Run on machines with GPUs, or set the gpus of these stages to 0 (train.use_gpu to false)."
        findings.append(Finding(level="error", check="GPUs", message=message, fix=fix))
    elif not count:
        findings.append(Finding(level="ok", check="GPUs", message="none, and no stage asks for one."))
    return findings


def _check_node(name: str, node: NodeGpus) -> list[Finding]:
    findings = []
    for gpu in node.gpus:
        reading = gpu.reading
        where = f"{name} GPU {reading.index}" if name else f"GPU {reading.index}"
        major, minor = reading.capability
        message = (
            f"{where}, {reading.name} (sm_{major}{minor}): {human_bytes(reading.used)} of {human_bytes(reading.total)}"
        )
        words = [describe(holder) for holder in gpu.holders]
        if gpu.nobodys:
            pids = f" (on the host: pid {', '.join(map(str, gpu.outside))})" if gpu.outside else ""
            words.append(f"{human_bytes(gpu.nobodys)} of no process that can be seen from here{pids}")
        fixes = []
        if any(holder.standing.stale for holder in gpu.holders):
            fixes.append("`ray-eagle preflight --free-gpus` ends what was left behind.")
        if others := [h.process.pid for h in gpu.holders if not h.standing.stale]:
            named = " ".join(f"--pid {pid}" for pid in others)
            fixes.append(f"The others end by themselves, or with `--free-gpus {named}`, which asks first.")
        if gpu.nobodys:
            fixes.append(f"Another container or a user that is hidden here holds it: on the host run `{ON_THE_HOST}`.")
        text = f"{message} used by {'; '.join(words)}." if words else f"{message} used, no process on it."
        findings.append(Finding(level="warning" if words else "ok", check="GPUs", message=text, fix=" ".join(fixes)))
    if node.left_behind:
        where = f"{name}: " if name else ""
        findings.append(
            Finding(
                level="warning",
                check="GPUs",
                message=f"{where}on no GPU, {'; '.join(describe(holder) for holder in node.left_behind)}.",
                fix="`ray-eagle preflight --free-gpus` ends what was left behind.",
            )
        )
    if node.gpus and node.unreadable:
        findings.append(
            Finding(
                level="warning",
                check="GPUs",
                message=f"{name or 'here'}: the open files of {node.unreadable} processes of other users cannot be listed.",
                fix="Run as root to see who of them is on a GPU.",
            )
        )
    return findings


def _read_gpu(index: int) -> GpuReading:
    import pynvml as lib

    handle = lib.nvmlDeviceGetHandleByIndex(index)
    try:  # the second form leaves out what the driver keeps for itself
        memory = lib.nvmlDeviceGetMemoryInfo(handle, version=lib.nvmlMemory_v2)
    except lib.NVMLError:
        memory = lib.nvmlDeviceGetMemoryInfo(handle)
    try:
        running, minor = lib.nvmlDeviceGetComputeRunningProcesses(handle), lib.nvmlDeviceGetMinorNumber(handle)
    except lib.NVMLError:  # some sandboxes answer only the plain questions
        running, minor = [], index
    return GpuReading(
        index=index,
        minor=minor,
        name=_text(lib.nvmlDeviceGetName(handle)),
        total=memory.total,
        used=memory.used,
        capability=tuple(lib.nvmlDeviceGetCudaComputeCapability(handle)),
        processes=tuple((p.pid, p.usedGpuMemory) for p in running),
    )


def _on_gpus(process: Process | None) -> bool:
    """It can be the one that the driver means."""
    return process is not None and (bool(process.devices) or process.cuda or not process.readable)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
