"""Memory of `generate` with kept answers on an input larger than it: the driver's peak above its idle size.

    python -m tests.benchmarks.inputs --mib 2048 --folder /tmp/inputs       # about half an hour on two cores

Makes a JSONL of random questions and long answers, and runs the stage on it with the example model's tokenizer.
"""

import argparse
import json
import random
import threading
import time
from pathlib import Path

from ray_eagle.run import RunFolder
from ray_eagle.settings import load_config
from ray_eagle.stages import Pipeline

PAGE = 4096


class Shown:
    """Progress on the terminal, a line a minute."""

    def __init__(self) -> None:
        self.done, self.told = 0.0, time.monotonic()

    def start(self, task: str, total: float, unit: str, done: float = 0) -> None:
        print(f"{task}: {total:,.0f} {unit}", flush=True)

    def advance(self, amount: float, note: str = "") -> None:
        self.done += amount
        if time.monotonic() - self.told > 60:
            self.told = time.monotonic()
            print(f"{self.done:,.0f}, {note}", flush=True)

    def say(self, message: str) -> None:
        print(message, flush=True)


def write_rows(file: Path, size: int, words_an_answer: int) -> int:
    """Rows of about 8 bytes a word; returns how many."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))) for _ in range(5000)]
    rows = written = 0
    with file.open("w") as out:
        while written < size:
            question, answer = (" ".join(rng.choices(words, k=k)) for k in (40, words_an_answer))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            written += out.write(json.dumps({"id": f"r{rows}", "messages": messages}) + "\n")
            rows += 1
    return rows


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument(
        "--words", type=int, default=1000, help="words of an answer; the tokenizer makes about three tokens of one"
    )
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    file = arguments.folder / "rows.jsonl"
    rows = write_rows(file, arguments.mib * 2**20, arguments.words)
    flags = ["--run", str(arguments.folder / "run"), "--generate.prompts", str(file), "--generate.answers", "keep"]
    config = load_config(preset="smollm2-cpu", flags=flags).config
    run = RunFolder.open(config.run)
    run.create()
    pipeline = Pipeline(config, run, Shown())
    pipeline.connect()
    assert pipeline.facts
    idle = peak = resident()

    def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, resident())
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    began = time.monotonic()
    pipeline.stage("generate")
    seconds = time.monotonic() - began
    print(
        f"{file.stat().st_size / 2**20:,.0f} MiB, {rows:,} rows in {seconds:,.0f} s: driver {idle / 2**20:,.0f} MiB idle, "
        f"peak {(peak - idle) / 2**20:,.0f} MiB above it"
    )


if __name__ == "__main__":
    main()
