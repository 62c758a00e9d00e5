"""A drafter of AQ-MedAI's exact shape, 2.38 GB of random weights made on the spot: show, check and convert it.

    python -m tests.benchmarks.founding_drafter FOLDER

Prints the seconds of each command, its start included, beside what a plain copy and sync of the file takes there. The drafter stays in FOLDER/drafter: `training_step.py --shape kimi --drafter FOLDER/drafter` takes a step from it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from ray_eagle.drafter.files import WEIGHTS, read_stored
from tests.drafters import AQ_MEDAI, kimi_config, sparse_drafter

TILE = 2**22
"""Random values of a tensor repeat after so many."""


def make(folder: Path) -> Path:
    """The folder, with small random numbers where the sparse one has holes."""
    sparse_drafter(folder, AQ_MEDAI)
    path = folder / WEIGHTS
    tile = (torch.randn(TILE) * 0.02).bfloat16().view(torch.int16).numpy()
    with path.open("r+b") as file:
        for name, tensor in read_stored(path).items():
            if tensor.dtype != "BF16":
                continue
            file.seek(tensor.start)
            one = np.full(tensor.bytes // 2, 0x3F80, np.int16) if "norm" in name else tile
            for at in range(0, tensor.bytes // 2, len(one)):
                file.write(one[: tensor.bytes // 2 - at].tobytes())
        os.fsync(file.fileno())
    return folder


def run(name: str, words: list[str]) -> None:
    """A command in a process of its own: a row of the table."""
    began = time.perf_counter()
    status = subprocess.run(
        [sys.executable, "-m", "ray_eagle", "drafter", *words], stdout=subprocess.DEVNULL
    ).returncode
    row(name, time.perf_counter() - began)
    if status:
        sys.exit(f"{name} failed")


def row(name: str, seconds: float) -> None:
    print(f"| {name} | {seconds:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    drafter, target = make(folder / "drafter"), kimi_config(folder / "target")
    size = (drafter / WEIGHTS).stat().st_size
    print(f"{size / 1e9:.2f} GB\n| command | seconds |\n|---|---|", flush=True)
    run("show", ["show", str(drafter)])
    run("check", ["check", str(drafter), "--target", str(target), "--engine", "reference"])
    run("convert", ["convert", str(drafter), str(folder / "converted"), "--to", "speculators"])
    began = time.perf_counter()
    with (drafter / WEIGHTS).open("rb") as source, (folder / "copy").open("wb") as sink:
        shutil.copyfileobj(source, sink, 2**24)
        sink.flush()
        os.fsync(sink.fileno())
    row("a plain copy and sync", time.perf_counter() - began)
    shutil.rmtree(folder / "converted")
    (folder / "copy").unlink()


if __name__ == "__main__":
    main()
