"""How much arithmetic a pack takes, and how much a GPU can do: together the share of it that is used (MFU).

Counted are the multiplications and additions of matrix products and attention that the loss and its gradient need, on the
positions where they are needed; what is computed twice to save memory counts once.
"""

import math

import torch

from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.training.packing import Pack

PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10", 125.0),
)
"""bf16, dense, as the vendor states it; the first name that a device's name holds as whole words."""


def peak_tflops(device_name: str) -> float | None:
    """Of a GPU by its name; None when unknown."""
    words = f" {device_name} ".replace("-", " ")
    return next((peak for name, peak in PEAK_TFLOPS if f" {name} " in words), None)


def pack_flops(shape: DrafterShape, pack: Pack) -> float:
    """Floating-point operations of the forward and backward pass over a pack (its indices on the CPU)."""
    h, heads = shape.hidden_size, shape.num_attention_heads
    sizes = {name.split(".")[-2]: math.prod(size) for name, size in shape.tensors().items() if len(size) == 2}
    keys = sum(size for name, size in sizes.items() if name.startswith(("k", "v_")))
    rest = sum(size for name, size in sizes.items() if name.startswith(("q_", "o_", "gate_", "up_", "down_")))
    tokens = pack.spans.bounds[len(pack.names) - 1][3]  # without those that fill up to a multiple
    # the projection of the aux states has no gradient below it: one product backward, where all others have two
    total = 2.0 * (2 * tokens * 3 * h * h)
    total += 3.0 * (2 * tokens * keys)
    for k, step in enumerate(pack.steps):
        rows = int(torch.searchsorted(step.at_N, tokens))
        total += 3.0 * 2 * rows * (rest + keys if k else rest)
        seen = int(step.position_N[:rows].sum()) + rows
        total += 3.0 * (2 * seen * heads * (shape.head_dim + shape.value_dim))
        total += 3.0 * (2 * len(step.scored_M) * h * shape.draft_vocab_size)
    # the teachers of later steps are among the first one's
    return total + 2.0 * len(pack.steps[0].teacher_M) * h * shape.draft_vocab_size
