"""Training loses a whole node: it goes on from the last checkpoint, and the curve is that of an undisturbed run."""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import yaml

from tests.cluster.test_chaos import alone
from tests.ray.pipeline import tiny_config
from tests.ray.training import curve, same
from tests.tiny import tiny_target

TRAIN = {"deterministic": True, "checkpoint_every": 3, "epochs": 3, "cpus_per_worker": 2, "max_failures": 1}


def test_a_node_that_dies_under_training_leaves_no_trace() -> None:
    seen = alone("-c", "from tests.cluster.test_train_nodes import lose_a_node; lose_a_node()", timeout=300)
    assert seen["same"], seen
    assert 0 < seen["killed_at"] < seen["last"]


def lose_a_node() -> None:
    """Train in peace, then again while the node of the one worker (2 CPUs, which the head has not) is killed once."""
    from tests.cluster.chaos import Failed, Machines

    with tempfile.TemporaryDirectory() as temporary, Machines() as machines:
        folder = Path(temporary)
        tiny_target(folder / "target")
        config = tiny_config(folder, folder / "target", train=TRAIN)
        (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))

        def start(stage: str, run: str = "calm"):  # type: ignore[no-untyped-def]
            return machines.spawn(folder, stage, "--run", str(folder / run / "run"), log=folder / f"{run}-{stage}.log")

        for stage in ("generate", "extract", "vocab"):
            if start(stage).wait(200):
                raise Failed((folder / f"calm-{stage}.log").read_text()[-3000:])
        shutil.copytree(folder / "calm", folder / "stormy")
        calm = start("train")
        if calm.wait(200):
            raise Failed((folder / "calm-train.log").read_text()[-3000:])
        stormy, killed_at = start("train", "stormy"), 0.0
        while stormy.poll() is None:
            rows = curve(folder / "stormy")
            if not killed_at and rows and rows[-1]["step"] >= 4:
                killed_at = rows[-1]["step"]
                [worker] = machines.workers("RayTrainWorker")
                machines.replace(machines.node_of(worker))
            time.sleep(0.05)
        log = (folder / "stormy-train.log").read_text()
        last = curve(folder / "calm")[-1]["step"]
        print(json.dumps({
            "same": stormy.returncode == 0 and same(folder / "stormy", folder / "calm"), "killed_at": killed_at, "last": last, "log": log[-3000:],
        }), file=sys.stdout)  # fmt: skip
