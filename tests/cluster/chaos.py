"""Chaos: kill actors, nodes and drivers of `extract` at random, and demand the same dataset, to the byte.

    python -m tests.cluster.chaos --kills 50 --drivers 3

A cluster of its own (a head and two worker nodes, all processes on this machine) runs `extract` twice over the same
conversations: with one actor, in peace, and with three, while a seeded random process kills. SIGKILLs of actors are
paced by progress: the next one comes once another unit is committed (or after GRACE_S), so the run always ends. Prints one
JSON object; exits 1, with what went wrong, when the two datasets differ, `verify` finds a fault, or a sample is missing.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("RAY_ADDRESS", None)

import yaml
from ray.cluster_utils import Cluster

from ray_eagle.hidden_states.dataset import read_plan, read_records
from ray_eagle.run import RunFolder
from tests.ray.pipeline import TOPICS, tiny_config
from tests.tiny import tiny_target

ACTORS = 3
ACTOR = "Extractor"
"""In the titles of the processes of extraction actors, starting or working."""
STORE = 80 * 2**20
GRACE_S = 20.0
PATIENCE_S = 120.0


class Failed(Exception):
    """The run did not hold what it must."""


@dataclass
class Figures:
    """What a chaos run did."""

    seed: int
    actors_killed: int = 0
    nodes_killed: int = 0
    drivers_killed: int = 0
    units: int = 0
    samples: int = 0
    bytes: int = 0
    calm_s: float = 0.0
    chaos_s: float = 0.0
    said: list[str] = field(default_factory=list)
    """What the drivers said about deaths."""


class Machines:
    """The cluster: a head with one CPU, where drivers join, and two nodes with two each. A context manager."""

    def __enter__(self) -> "Machines":
        self.cluster = Cluster(
            initialize_head=True,
            connect=False,
            head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
        )
        self.nodes = [self._add() for _ in range(2)]
        self.spawned: list[subprocess.Popen[bytes]] = []
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.spawned:
            process.kill()
            process.wait()
        workers = self.workers("ray::")
        self.cluster.shutdown()
        deadline = time.monotonic() + 10
        while (left := [pid for pid in workers if title(pid).startswith("ray::")]) and time.monotonic() < deadline:
            time.sleep(0.1)  # they end by themselves when their raylet is gone
        for pid in left:
            os.kill(pid, signal.SIGKILL)

    def spawn(self, folder: Path, stage: str, *words: str, log: Path) -> "subprocess.Popen[bytes]":
        """`ray-eagle STAGE` with the settings of the folder, on this cluster; killed at the latest when that ends."""
        env = {**os.environ, "RAY_ADDRESS": self.cluster.address, "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "ray_eagle", stage, "-c", str(folder / "run.yaml"), *words]
        with log.open("wb") as file:
            self.spawned.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file))
        return self.spawned[-1]

    def _add(self) -> Any:
        return self.cluster.add_node(num_cpus=2, object_store_memory=STORE)

    def workers(self, name: str) -> list[int]:
        """Pids of this cluster's own workers whose title contains `name`: children of its raylets, of no other's."""
        raylets = {
            info.process.pid
            for node in (self.cluster.head_node, *self.cluster.worker_nodes)
            for info in node.all_processes["raylet"]
        }
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return sorted(pid for pid in pids if name in title(pid) and parent(pid) in raylets)

    def node_of(self, pid: int) -> int:
        """Index of the node that a worker runs on."""
        raylets = [{info.process.pid for info in node.all_processes["raylet"]} for node in self.nodes]
        return next(i for i, pids in enumerate(raylets) if parent(pid) in pids)

    def replace(self, index: int) -> None:
        """SIGKILL a node's raylet and all that belongs to it, then add a fresh node."""
        self.cluster.remove_node(self.nodes[index], allow_graceful=False)
        self.nodes[index] = self._add()


class Driver:
    """`ray-eagle extract` on the cluster, as a process."""

    def __init__(self, machines: Machines, folder: Path, run: str, actors: int) -> None:
        self.machines, self.folder, self.run, self.actors = machines, folder, run, actors
        self.started = 0
        self.start()

    def start(self) -> None:
        self.started += 1
        words = ["--run", str(self.folder / self.run), "--extract.actors", str(self.actors)]
        self.log = self.folder / f"{self.run}-{self.started}.log"
        self.process = self.machines.spawn(self.folder, "extract", *words, log=self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self) -> None:
        """Wait for the end of the stage. Raises Failed when it did not end well."""
        if self.process.wait(600):
            raise Failed(f"{self.run}: extract ended with {self.process.returncode}: {self.log.read_text()[-3000:]}")

    @property
    def records(self) -> int:
        return len(list((self.folder / self.run / "hidden_states").glob("unit-*.json")))


def chaos(folder: Path, *, kills: int, nodes: int, drivers: int, seed: int) -> Figures:
    """Kill `kills` actors and nodes (`nodes` of them nodes) and `drivers` drivers. Raises Failed."""
    figures = Figures(seed)
    rng = random.Random(seed)
    plan = ["node"] * nodes + ["actor"] * (kills - nodes)
    rng.shuffle(plan)
    for place in sorted(rng.sample(range(1, kills), drivers), reverse=True):
        plan.insert(place, "driver")
    with Machines() as machines:
        prepare(machines, folder, conversations=60 + 12 * kills)
        began = time.monotonic()
        Driver(machines, folder, "calm", 1).finish()
        figures.calm_s = round(time.monotonic() - began, 1)
        began = time.monotonic()
        driver = Driver(machines, folder, "chaos", ACTORS)
        try:
            for number, what in enumerate(plan, 1):
                wait_for_progress(driver)
                time.sleep(rng.random() * 0.3)
                strike(what, machines, driver, rng, figures)
                sys.stderr.write(
                    f"{time.monotonic() - began:6.1f} s  {number}/{len(plan)} {what}, {driver.records} units\n"
                )
            driver.finish()
        finally:
            driver.kill()
        figures.chaos_s = round(time.monotonic() - began, 1)
    for log in sorted(folder.glob("chaos-*.log")):
        figures.said += [
            line for line in log.read_text().splitlines() if line.startswith("extract:") and "actors died" in line
        ]
    judge(folder, figures)
    return figures


def strike(what: str, machines: Machines, driver: Driver, rng: random.Random, figures: Figures) -> None:
    if driver.process.poll() is not None:
        raise Failed(
            f"the run ended before its last kill ({driver.process.returncode}): {driver.log.read_text()[-3000:]}"
        )
    if what == "driver":
        driver.kill()
        figures.drivers_killed += 1
        driver.start()
    elif what == "node":
        machines.replace(rng.randrange(2))
        figures.nodes_killed += 1
    else:
        until(
            lambda: bool(machines.workers(ACTOR)) or driver.process.poll() is not None, PATIENCE_S, "no actor to kill"
        )
        if victims := machines.workers(ACTOR):
            os.kill(rng.choice(victims), signal.SIGKILL)
            figures.actors_killed += 1


def wait_for_progress(driver: Driver) -> None:
    """Until one more unit is committed; GRACE_S at most, since all actors may have been killed while starting."""
    before, deadline = driver.records, time.monotonic() + GRACE_S
    while driver.records == before and time.monotonic() < deadline and driver.process.poll() is None:
        time.sleep(0.02)


def prepare(machines: Machines, folder: Path, conversations: int) -> None:
    """A deep, narrow target (slow for its size), settings that make many small units, and conversations for two runs."""
    tiny_target(folder / "target", layers=64)
    prompts = [{"id": f"p{i}", "turns": [f"{i}: {TOPICS[i % 6]}"]} for i in range(conversations)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    config = tiny_config(
        folder,
        folder / "target",
        generate={
            "max_new_tokens": 8,
            "batch_size": 64,
            "part_size": 64,
            "held_out_share": 0.0,
            "validation_share": 0.1,
            "actors": 2,
        },
        extract={"unit_mib": 0.04, "tokens_per_batch": 32},
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    log = folder / "generate.log"
    if machines.spawn(folder, "generate", "--run", str(folder / "calm"), log=log).wait(600):
        raise Failed(f"generate: {log.read_text()[-3000:]}")
    shutil.copytree(folder / "calm" / "conversations", folder / "chaos" / "conversations")


def judge(folder: Path, figures: Figures) -> None:
    """Raises Failed unless the disturbed dataset is whole, sound and equal to the undisturbed."""
    calm, disturbed = committed(folder / "calm"), committed(folder / "chaos")
    different = [unit for unit in calm if disturbed.get(unit) != calm[unit]]
    if different or calm.keys() != disturbed.keys():
        raise Failed(f"units {different} differ between the calm run and the disturbed one")
    states = RunFolder.open(str(folder / "chaos")).of("extract")
    plan = read_plan(states)
    planned = sum(len(unit.samples) for unit in plan.units)
    rows = sum(len(record.rows) for record in read_records(states, plan).values())
    if rows != planned or len(calm) != len(plan.units):
        raise Failed(f"{rows} of {planned} samples in {len(calm)} of {len(plan.units)} units: something was set aside")
    words = [sys.executable, "-m", "ray_eagle", "verify", states.path, "--json"]
    verified = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if verified.returncode or json.loads(verified.stdout)["faults"]:
        raise Failed(f"verify: {verified.stdout} {verified.stderr}")
    figures.units, figures.samples, figures.bytes = len(calm), rows, sum(map(len, calm.values()))


def committed(run: Path) -> dict[int, bytes]:
    """Bytes of every committed shard, by unit."""
    states = RunFolder.open(str(run)).of("extract")
    return {unit: states.read_bytes(record.file) for unit, record in read_records(states, read_plan(states)).items()}


def until(true: Callable[[], bool], seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise Failed(f"{complaint} within {seconds:g} s")
        time.sleep(0.05)


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50, help="of actors and nodes")
    parser.add_argument("--nodes", type=int, help="of these, whole nodes (default: a tenth)")
    parser.add_argument("--drivers", type=int, default=3, help="kills of the driver, besides")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    nodes = max(1, given.kills // 10) if given.nodes is None else given.nodes
    with tempfile.TemporaryDirectory(prefix="ray-eagle-chaos-") as folder:
        try:
            figures = chaos(Path(folder), kills=given.kills, nodes=nodes, drivers=given.drivers, seed=given.seed)
        except Failed as error:
            sys.exit(f"chaos (seed {given.seed}): {error}")
    print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
