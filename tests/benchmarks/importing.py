"""How fast another project's files of hidden states become a dataset: GB/s of `extract`, beside a plain copy of the files.

    python -m tests.benchmarks.importing FOLDER --files 96 --hidden 1024

Writes files of 2,048 random tokens and states as SpecForge does, takes them over with the commands of a user, and copies the same files for
comparison. The seconds of both stages include the start of Ray.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.loose import specforge
from tests.tiny import VOCAB, tiny_target

LENGTH = 2048
LAYERS = 5


def timed(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(words, check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=96)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--actors", type=int, default=2)
    arguments = parser.parse_args()
    folder, hidden = arguments.folder, arguments.hidden
    target = tiny_target(folder / "target", hidden=hidden, layers=LAYERS, context=2 * LENGTH, scale=0.02)
    head_VH = load_file(target / "model.safetensors")["lm_head.weight"]
    mask = [0] * (LENGTH // 4) + [1] * (LENGTH - LENGTH // 4)
    for number in range(arguments.files):
        ids = torch.randint(0, VOCAB - 8, (LENGTH,))
        # states that the head reads as the tokens which follow: others are refused
        last = F.normalize(head_VH[ids.roll(-1)], dim=-1) * hidden**0.5
        specforge(
            folder / "files", number, (ids.tolist(), mask, torch.randn(LENGTH, 3 * hidden).bfloat16(), last.bfloat16())
        )
    size = sum(path.stat().st_size for path in (folder / "files").rglob("*.ckpt"))
    words = [sys.executable, "-m", "ray_eagle"]
    settings = [
        *("--run", str(folder / "run"), "--target.path", str(target), "--states.path", str(folder / "files")),
        *("--states.layers", "[1, 2, 3]", "--target.aux_layers", "[1, 2, 3]", "--states.norm", "after"),
        *("--generate.max_prompt_tokens", str(LENGTH), "--extract.actors", str(arguments.actors)),
    ]
    print(
        f"{arguments.files} files, {size / 1e9:.2f} GB, {arguments.actors} actors\n| | seconds | GB/s |\n|---|---|---|"
    )
    for stage in ("generate", "extract"):
        seconds = timed([*words, stage, *settings])
        print(f"| {stage} | {seconds:.1f} | {size / seconds / 1e9:.2f} |", flush=True)
    seconds = timed(["cp", "-r", str(folder / "files"), str(folder / "copy")])
    print(f"| a plain copy | {seconds:.1f} | {size / seconds / 1e9:.2f} |", flush=True)
    shutil.rmtree(folder / "copy")


if __name__ == "__main__":
    main()
