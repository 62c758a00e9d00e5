"""Loading rows into a reused batch buffer against `torch.load` of one file a sample, both from the page cache.

    python -m tests.benchmarks.loader [--gib 2] [--folder /tmp/loader]

Both read the same samples (Llama-3.1-8B's hidden size, log-normal lengths), in the same random order, in batches of about
8,192 tokens, with two threads' worth of process. Ours lands the bytes in a buffer that is used again, and checks nothing it
need not; the plain way gets one dict of tensors a file (`weights_only`, memory-mapped or not: the faster of the two is shown
too).
"""

import argparse
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ray_eagle.hidden_states.dataset import DatasetWriter
from ray_eagle.hidden_states.plan import plan_packs, plan_units
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.hidden_states.schema import Sample
from ray_eagle.run import Folder
from tests.benchmarks.extraction import make_samples
from tests.random_data import make_plan, write_shard

HIDDEN, VOCAB = 4096, 128256


def build(folder: Path, gib: float) -> tuple[HiddenStates, list[Path]]:
    """The same samples as a dataset and as loose files."""
    rows = make_samples(round(gib * 2**30 / 30_000), 0.7, VOCAB)
    units = plan_units(rows, unit_bytes=512 * 2**20, hidden_size=HIDDEN, state_dtype="bfloat16", seed=0)
    plan = make_plan(units, hidden=HIDDEN, vocab=VOCAB)
    noise = torch.randint(-(2**15), 2**15, (4096, 3 * HIDDEN), dtype=torch.int16).view(torch.bfloat16)
    loose = folder / "loose"
    loose.mkdir(parents=True)
    files = []
    data = Folder.at(folder / "data")
    with DatasetWriter(data, plan) as writer:
        for unit in units:
            samples = [
                Sample(
                    row.sample_id,
                    row.source_id,
                    torch.tensor(row.input_ids, dtype=torch.int32),
                    torch.tensor(row.loss_mask, dtype=torch.uint8),
                    noise[: len(row.input_ids)],
                    noise[: row.teaching, :HIDDEN],
                    torch.zeros(row.teaching, dtype=torch.int32),
                    torch.zeros(row.teaching),
                )
                for row in unit.samples
            ]
            writer.commit(write_shard(data, unit, samples, HIDDEN, "bfloat16"))
            for sample in samples:
                files.append(loose / f"{sample.sample_id}.ckpt")
                torch.save(
                    {
                        "input_ids": sample.input_ids,
                        "loss_mask": sample.loss_mask,
                        "aux_hidden_state": sample.aux.clone(),
                        "hidden_state": sample.last.clone(),
                    },
                    files[-1],
                )
    return HiddenStates(data, "train"), files


def timed(read: Callable[[], int], repeats: int) -> float:
    """GB/s, the median over repeats."""
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        size = read()
        rates.append(size / (time.perf_counter() - began) / 1e9)
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/loader-benchmark"))
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(2)
    states, files = build(given.folder, given.gib)
    order = random.Random(1).sample(range(len(states)), len(states))
    groups = [[order[i] for i in pack] for pack in plan_packs([states.lengths()[i] for i in order], 8192)]

    # one long reading, timed pass by pass, as in training: the buffers are made once
    reading = states.batches(groups * (given.repeats + 1))

    def ours() -> int:
        return sum(s.aux.nbytes + s.last.nbytes for _ in groups for s in next(reading))

    def plain(mmap: bool) -> int:
        size = 0
        for group in groups:
            for i in group:
                item = torch.load(files[i], weights_only=True, mmap=mmap)
                size += sum(item[name].nbytes for name in ("aux_hidden_state", "hidden_state"))
                if mmap:  # the bytes shall be there, as they are with the others
                    item["aux_hidden_state"].clone(), item["hidden_state"].clone()
        return size

    ours(), plain(False)  # warm
    print(f"{'':<44}{'GB/s':>8}")
    fast = timed(ours, given.repeats)
    print(f"{'ours: batches into a reused buffer':<44}{fast:>8.2f}")
    slow = {mmap: timed(lambda mmap=mmap: plain(mmap), given.repeats) for mmap in (False, True)}
    print(f"{'torch.load, one file a sample':<44}{slow[False]:>8.2f}")
    print(f"{'torch.load(mmap=True), then a copy':<44}{slow[True]:>8.2f}")
    print(f"{fast / max(slow.values()):.2f}x the faster of them")
    shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
