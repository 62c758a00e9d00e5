"""A small target made heavy: the same answers from many times the work: python3 -m tests.gpu.heavy TARGET OUT --layers 500 --intermediate 8192

Appends layers whose output projections are zero, so that each adds nothing to the residual stream, and widens every MLP by
columns whose down projection is zero. Logits, and the states after the target's own layers, stay what they were (bit for bit
but for the order of sums), so a drafter of TARGET drafts for OUT; but a step takes the GPU as long as one of a large target,
and the host's share of it is small. `path.sh heavy` measures with it what the host's noise hides in a step of SmolLM2.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SCALE = 0.02


def heavier(tensors: dict[str, Tensor], depth: int, extra: int, intermediate: int) -> dict[str, Tensor]:
    """The tensors of one idle layer and of the widened ones, by name; norms, embeddings and head as they are.

    `tensors`: of a Llama-like target with `depth` layers.
    """
    generator = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        # a few thousand random rows, repeated: filling gigabytes with normal numbers would take minutes
        block = torch.randn(min(len(like), 1024), like.shape[1], generator=generator).to(like.dtype) * SCALE
        return block.repeat(-(-len(like) // len(block)), 1)[: len(like)].contiguous()

    made = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith((".gate_proj.weight", ".up_proj.weight")):
            made[name] = torch.cat([tensor, random(tensor.new_empty(intermediate - len(tensor), tensor.shape[1]))])
        elif name.endswith(".down_proj.weight"):
            zeros = tensor.new_zeros(len(tensor), intermediate - tensor.shape[1])
            made[name] = torch.cat([tensor, zeros], 1)
    last = f"model.layers.{depth - 1}."
    for name in [name for name in made if name.startswith(last)]:
        tensor = made[name]
        idle = torch.zeros_like(tensor) if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor
        for layer in range(depth, depth + extra):
            made[f"model.layers.{layer}.{name.removeprefix(last)}"] = idle.clone()
    return made


def make_heavy(source: Path, out: Path, extra: int, intermediate: int) -> None:
    """Write the folder `out`; tokenizer and settings are the source's."""
    config = json.loads((source / "config.json").read_text())
    depth = config["num_hidden_layers"]
    [weights] = source.glob("*.safetensors")
    made = heavier(load_file(weights), depth, extra, intermediate)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    layers: dict[str, list[str]] = {}
    for name in made:
        parts = name.split(".")
        layers.setdefault(str(int(parts[2]) // 16) if parts[1] == "layers" else "rest", []).append(name)
    names = {}
    for group, members in layers.items():
        file = f"model-{group}.safetensors"
        save_file({name: made[name] for name in members}, out / file, metadata={"format": "pt"})
        names |= dict.fromkeys(members, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    changes = {"num_hidden_layers": depth + extra, "intermediate_size": intermediate}
    (out / "config.json").write_text(json.dumps(config | changes, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=500, help="idle ones, behind the target's own")
    parser.add_argument("--intermediate", type=int, default=8192)
    arguments = parser.parse_args()
    make_heavy(arguments.target, arguments.out, arguments.layers, arguments.intermediate)


if __name__ == "__main__":
    main()
