"""Training loses a whole node: it goes on from the last checkpoint, and its curve is that of an undisturbed run."""

import json
import shutil
import tempfile
import time
from pathlib import Path

import yaml

from tests.cluster.test_chaos import alone
from tests.ray.pipeline import tiny_config
from tests.ray.training import curve, train_here
from tests.tiny import tiny_target

TRAIN = {"deterministic": True, "checkpoint_every": 3, "epochs": 3, "cpus_per_worker": 2, "max_failures": 1}


def test_a_node_that_dies_under_training_leaves_no_trace() -> None:
    seen = alone("-c", "from tests.cluster.test_train_nodes import lose_a_node; lose_a_node()", timeout=300)
    assert seen["same"], seen
    assert 0 < seen["killed_at"] < seen["last"]


def lose_a_node() -> None:
    """Train on one Ray worker, on a node of its own (2 CPUs, which the head has not) that is killed once; and in peace here."""
    from tests.cluster.chaos import Failed, Machines

    with tempfile.TemporaryDirectory() as temporary, Machines() as machines:
        folder = Path(temporary)
        tiny_target(folder / "target")
        config = tiny_config(folder, folder / "target", train=TRAIN)
        (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        for stage in ("generate", "extract", "vocab"):
            log = folder / f"{stage}.log"
            if machines.spawn(folder, stage, log=log).wait(200):
                raise Failed(log.read_text()[-3000:])
        calm = folder / "calm"
        shutil.copytree(folder / "run", calm / "run")
        log, killed_at = folder / "train.log", 0.0
        stormy = machines.spawn(folder, "train", log=log)
        while stormy.poll() is None:
            rows = curve(folder)
            if not killed_at and rows and rows[-1]["step"] >= 4:
                killed_at = rows[-1]["step"]
                [worker] = machines.workers("RayTrainWorker")
                machines.replace(machines.node_of(worker))
            time.sleep(0.05)
        if stormy.returncode:
            raise Failed(log.read_text()[-3000:])
        train_here(config.model_copy(update={"run": str(calm / "run")}))
        print(
            json.dumps({"same": curve(calm) == curve(folder), "killed_at": killed_at, "last": curve(calm)[-1]["step"]})
        )
