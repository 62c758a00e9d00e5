"""Faults on a cluster of several nodes: nothing is lost, doubled, changed or set aside, and lost nodes blame nobody.

Each scenario is a process of its own, since this one may be joined to the session's cluster. `make chaos` is the long form.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def alone(*words: str, timeout: float) -> Any:
    """What `python WORDS` prints as JSON; it is asked to end, and to take its cluster down, when it takes too long."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, err[-5000:]
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))  # Ray prints there, too


def test_chaos_changes_not_a_byte() -> None:
    figures = alone("-m", "tests.cluster.chaos", "--kills", "6", "--drivers", "1", "--seed", "1", timeout=400)
    assert figures["actors_killed"] + figures["nodes_killed"] == 6
    assert figures["nodes_killed"] == figures["drivers_killed"] == 1
    assert figures["units"] > 20 and figures["samples"] > figures["units"]


def test_a_unit_whose_nodes_die_under_it_three_times_is_not_blamed() -> None:
    seen = alone("-c", "from tests.cluster.test_chaos import lose_nodes; lose_nodes()", timeout=200)
    assert seen["results"] == [["unit", "made in attempt 4"]]
    assert seen["deaths"] == 3 and seen["retries"] == 3
    assert seen["node_deaths"] >= 1, "the verdict waited until Ray knew of a dead node"


def lose_nodes() -> None:
    """Kill the node under a unit three times, faster than Ray notices; three deaths of a unit would end this pool."""
    import ray
    from ray.cluster_utils import Cluster

    from ray_eagle.pool import ActorPool, Member, this_node

    class Slow:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def ready(self) -> str:
            return this_node()

        def work(self, unit: str, without: frozenset[str]) -> str:
            attempt = len(list(self.folder.iterdir())) + 1
            (self.folder / str(attempt)).touch()
            time.sleep(600 if attempt <= 3 else 0)
            return f"made in attempt {attempt}"

    def make(name: str) -> Member:
        newest = max(int(key[4:]) for key in ray.cluster_resources() if key.startswith("node") and key[4:].isdigit())
        options = {"name": name, "resources": {f"node{newest}": 1}, "max_restarts": 0, "max_task_retries": 0}
        return Member(ray.remote(Slow).options(**options).remote(folder))

    def work() -> None:
        results.extend(pool.run(["unit"]))

    folder = Path(tempfile.mkdtemp(prefix="ray-eagle-nodes-"))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1, resources={"node1": 1})]
        ray.init(cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        pool, results = ActorPool(make, 1, "eagle-nodes"), []
        worker = threading.Thread(target=work, daemon=True)
        worker.start()  # and nodes here: Ray wants the main thread for them
        for attempt in (1, 2, 3):
            while not (folder / str(attempt)).exists():
                assert worker.is_alive()
                time.sleep(0.05)
            nodes.append(cluster.add_node(num_cpus=1, resources={f"node{attempt + 1}": 1}))
            cluster.remove_node(nodes[-2], allow_graceful=False)
        worker.join()
        seen = {"deaths": pool.deaths, "node_deaths": pool.node_deaths, "retries": pool.retries}
        print(json.dumps({"results": results, **seen}))
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder)
