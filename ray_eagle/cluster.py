"""Joining a Ray cluster, waiting for its resources, and facts about where this process runs. Never touches a GPU."""

import json
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pyarrow.fs as pafs
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_eagle.config import RayConfig
from ray_eagle.errors import ConfigError, InputError, WorkerError, explain
from ray_eagle.run import Folder
from ray_eagle.serving import supervisor

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the driver of a submitted job, and for nothing else
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
NODE_ANSWER_S = 60.0
MINE = f"run-{os.getpid()}-{secrets.token_hex(4)}"
"""Mark of the processes of this driver's actors."""

_private = False


@dataclass(frozen=True)
class ClusterInfo:
    """What was joined."""

    address: str
    nodes: int
    """Nodes that are alive."""
    resources: dict[str, float]
    """Totals of CPU, GPU, memory (bytes), ..."""
    private: bool
    """Started by this process, and ending with it."""


@dataclass(frozen=True)
class NodeAnswer:
    """What a function returned on a node, or why it did not."""

    node: str
    value: Any = None
    error: str = ""


def connect(config: RayConfig) -> ClusterInfo:
    """Join a cluster: `config.address`, else the job's, else RAY_ADDRESS, else a private local one without dashboard.

    Does nothing when this process has joined one already. What actors print stays in Ray's logs (their errors arrive as
    exceptions). From then on SIGTERM ends this process as Ctrl-C does, unless it had a handler of its own. Raises
    ConfigError when there is no such cluster.
    """
    global _private
    if not ray.is_initialized():
        address = config.address or ("auto" if in_job() else os.environ.get("RAY_ADDRESS")) or "local"
        _check_address(address, "ray.address" if config.address else "RAY_ADDRESS")
        _private = address == "local"
        options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
        if _private:
            cpus = config.num_cpus or max(4, os.cpu_count() or 1)
            options |= {"include_dashboard": False, "num_cpus": cpus}
        try:
            _probe(address)
            with _own_end():
                ray.init(address, **options)
        except (OSError, RuntimeError, ValueError) as error:
            fix = "Start one (`bash cluster/local.sh start`), or drop the address to use a private cluster."
            raise ConfigError(
                explain(
                    "no Ray cluster", where=address, expected="a head that answers", found=_first_line(error), fix=fix
                )
            ) from error
    alive = [node for node in ray.nodes() if node["Alive"]]
    return ClusterInfo(ray.get_runtime_context().gcs_address, len(alive), ray.cluster_resources(), _private)


def in_job() -> bool:
    """Is this process the driver of a job that `ray job submit` started?"""
    try:
        return "job_submission_id" in json.loads(os.environ[JOB_CONFIG])["metadata"]
    except (KeyError, ValueError, TypeError):
        return False


def ensure_resources(bundle: dict[str, float], count: int, wait_s: float) -> None:
    """Wait until `count` bundles (`{"CPU": 1, "GPU": 1}`), each whole on one node, are free at the same time.

    They are reserved once and given back, so an autoscaler sees the demand. A private cluster cannot grow: there, what
    it lacks is said at once. Raises WorkerError with what is asked, what the cluster has and what is missing.
    """
    asked = {name: amount for name, amount in bundle.items() if amount > 0}
    if not asked or count < 1:
        return
    if not _private or fitting(asked, count, _nodes()) == count:
        group = placement_group([asked] * count, strategy="PACK")
        try:
            if group.wait(wait_s):
                return
        finally:
            remove_placement_group(group)
    raise WorkerError(describe_shortage(asked, count, _nodes(), ray.available_resources()))


def shortage(bundle: dict[str, float], count: int) -> str | None:
    """Why the nodes that live could not hold `count` such bundles even if nothing else ran; None when they could."""
    asked = {name: amount for name, amount in bundle.items() if amount > 0}
    if not asked or fitting(asked, count, _nodes()) == count:
        return None
    return describe_shortage(asked, count, _nodes(), ray.available_resources())


def fitting(bundle: dict[str, float], count: int, nodes: list[dict[str, float]]) -> int:
    """How many of `count` equal bundles fit on nodes with these total resources, each whole on one node."""
    fits = 0
    for node in nodes:
        fits += int(min(node.get(name, 0.0) / amount + 1e-9 for name, amount in bundle.items()))
    return min(fits, count)


def describe_shortage(
    bundle: dict[str, float], count: int, nodes: list[dict[str, float]], free: dict[str, float]
) -> str:
    """One message: asked, present, free, missing, and the way out."""
    have = "; ".join(f"node {i}: {_amounts(node, bundle)}" for i, node in enumerate(nodes, 1)) or "no node"
    missing = count - fitting(bundle, count, nodes)
    if missing:
        lack = f"{missing} x {_amounts(bundle, bundle)} fit on no node"
        fix = "Ask for fewer or smaller actors or workers, add nodes, or raise ray.num_cpus of a private cluster."
    else:
        lack = f"free now: {_amounts(free, bundle)}; others hold the rest"
        fix = "Wait, stop what holds them (`ray list actors`, `ray job list`), ask for fewer, or raise ray.wait_s."
    return f"resources: asked for {count} x {_amounts(bundle, bundle)}; the cluster has {have}; missing: {lack}. {fix}"


def visible_everywhere(folder: Folder) -> None:
    """Prove that every node sees a folder: the driver writes a nonce in it, and a task pinned on each node reads it.

    Raises ConfigError that names the nodes that do not see it, or when this process cannot write there.
    """
    nonce = secrets.token_hex(16)
    name = f".nonce-{nonce[:8]}"
    try:
        folder.create()
        folder.write_bytes(name, nonce.encode())
    except OSError as error:
        raise ConfigError(
            explain(
                "run folder",
                where=folder.path,
                expected="a folder that can be written",
                found=error,
                fix="Choose another `run`.",
            )
        ) from None
    try:
        answers = on_every_node(_read, folder.fs, folder.path, name)
    finally:
        folder.delete_file(name)
    blind = [f"{a.node}: {a.error or a.value or 'an empty file'}" for a in answers if a.error or a.value != nonce]
    if blind:
        raise ConfigError(
            explain(
                "run folder is not shared",
                where=folder.path,
                expected=f"the file that this process wrote there, on each of {len(answers)} nodes",
                found="; ".join(blind),
                fix="Put `run` on a filesystem that every node mounts at the same path, or at a URI (s3://, gs://).",
            )
        )


def on_every_node(function: Callable[..., Any], *args: Any, timeout_s: float = NODE_ANSWER_S) -> list[NodeAnswer]:
    """Call `function(*args)` in a task without CPUs or GPUs pinned on each node that is alive, all at the same time."""
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    refs = {}
    for node in ray.nodes():
        if node["Alive"]:
            pin = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ref = task.options(scheduling_strategy=pin).remote(*args)
            refs[ref] = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    return [_answer(ref, node, timeout_s) for ref, node in refs.items()]


def marked(gpus: float, inherited: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options of an actor that uses GPUs: its process carries this run's mark, so `preflight --free-gpus` knows it as ours.

    A runtime environment of its own costs the start of a process, so actors without GPUs get none. Ray adds the job's
    environment to it, but Serve does not: there it has to be `inherited`.
    """
    if not gpus:
        return {}
    before = dict(inherited or {})
    return {"runtime_env": {**before, "env_vars": {**before.get("env_vars", {}), supervisor.MARK: MINE}}}


def total(resource: str) -> float:
    """What all nodes have of it, in use or not."""
    return ray.cluster_resources().get(resource, 0.0)


def live_jobs() -> frozenset[str]:
    """Ids of the jobs of this cluster that have not ended, in hexadecimal, this one included."""
    return frozenset(job["JobID"] for job in ray._private.state.jobs() if not job["IsDead"])


def _read(fs: pafs.FileSystem, path: str, name: str) -> str:
    try:
        return Folder(fs, path).read_bytes(name).decode()
    except (OSError, InputError) as error:
        return str(error)


def _answer(ref: Any, node: str, timeout_s: float) -> NodeAnswer:
    try:
        return NodeAnswer(node, ray.get(ref, timeout=0))
    except ray.exceptions.GetTimeoutError:
        return NodeAnswer(node, error=f"no answer within {timeout_s:g} s")
    except ray.exceptions.RayError as error:
        return NodeAnswer(node, error=_first_line(error))


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _amounts(resources: dict[str, float], names: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {resources.get(name, 0):g}" for name in names) + "}"


def _check_address(address: str, where: str) -> None:
    if "://" in address:
        raise ConfigError(
            explain(
                "Ray address",
                where=where,
                expected="`auto`, `local` or HOST:PORT of a head",
                found=address,
                fix=f"Unset {where}; to run on that cluster, submit a job: `ray-eagle STAGE --address DASHBOARD_URL`.",
            )
        )


@contextmanager
def _own_end() -> Iterator[None]:
    """Ray takes SIGTERM, and aborts with a dump of its stack: afterwards it is the process's own again, or as Ctrl-C."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _interrupt if before is signal.SIG_DFL else before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _probe(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT: Ray itself takes a minute to notice."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        return
    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    if host in LOOPBACK:  # Ray replaces it by the address of this machine, unless LOOPBACK_SWITCH is 0
        host = ray.util.get_node_ip_address()
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError:
            words = (
                f"one on loopback alone, and Ray looks for it at {host}: export {LOOPBACK_SWITCH}=0, or submit a job"
            )
            raise ConnectionError(words) from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
