"""A run folder on an object store: the same data, the same training, and a killed driver costs as little as on a disk."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from ray_eagle.hidden_states.dataset import read_plan, read_records
from ray_eagle.hidden_states.verify import verify
from ray_eagle.run import CHECKPOINTS, LOGS, Folder, RunFolder
from ray_eagle.serving.child import free_port
from ray_eagle.training.checkpoints import Checkpoints
from ray_eagle.training.trackers import HISTORY
from tests.ray.pipeline import pipeline, tiny_config
from tests.ray.test_train_resume import driver
from tests.ray.training import DETERMINISTIC, curve, without_clock

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """URI of a run folder in a bucket of an S3 server on this machine."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
    )
    place = f"endpoint_override=127.0.0.1%3A{port}&scheme=http"
    try:
        for _ in range(200):
            with socket.socket() as ask:
                if not ask.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        fs, _ = pafs.FileSystem.from_uri(f"s3://key:secret@bucket?{place}&allow_bucket_creation=true")
        fs.create_dir("bucket")
        yield f"s3://key:secret@bucket/run?{place}"
    finally:
        server.kill()
        server.wait()


def test_a_run_on_an_object_store_is_that_on_a_disk(
    bucket: str, captured: Path, uninterrupted: Path, target_folder: Path
) -> None:
    local = RunFolder.open(str(captured / "run"))
    config = tiny_config(captured, target_folder, train=DETERMINISTIC).model_copy(update={"run": bucket})
    run = RunFolder.open(bucket)
    run.create()
    conversations = run.of("generate").path
    pafs.copy_files(local.of("generate").path, conversations, source_filesystem=local.fs, destination_filesystem=run.fs)
    stages = pipeline(config)
    stages.stage("extract")
    assert verify(run.of("extract")) == []
    assert checksums(run.of("extract")) == checksums(local.of("extract"))
    stages.stage("vocab")
    last = curve(uninterrupted)[-1]["step"]
    with driver(config) as process:
        while len(Checkpoints(run.folder(CHECKPOINTS)).records()) < 2:
            assert process.poll() is None, "the driver ended by itself"
            time.sleep(0.1)
    lock = run.folder(CHECKPOINTS).read_json("lock.json")
    assert lock["pid"] == process.pid
    stages.stage("train")
    rows = run.folder(LOGS).read_jsonl(HISTORY)
    assert rows[-1]["step"] == last and without_clock(rows) == curve(uninterrupted)
    assert (
        run.of("train").read_bytes("model.safetensors")
        == (uninterrupted / "run" / "drafter" / "model.safetensors").read_bytes()
    )


def checksums(folder: Folder) -> list[list[str]]:
    """Of each row of each unit."""
    records = read_records(folder, read_plan(folder))
    return [[row.checksum for row in records[unit].rows] for unit in sorted(records)]
