"""Counted arithmetic against counting one position at a time, and the table of GPUs."""

import random

import pytest
import torch

from ray_eagle.hidden_states.schema import Sample
from ray_eagle.training.flops import pack_flops, peak_tflops
from ray_eagle.training.packing import make_pack
from tests.tiny import tiny_latent_shape, tiny_shape


def sample(rng: random.Random, hidden: int) -> Sample:
    length = rng.randint(2, 20)
    mask = [int(rng.random() < 0.7) for _ in range(length - 1)] + [1]
    teaching = sum(mask[1:])
    return Sample(
        str(rng.random()),
        "",
        torch.zeros(length, dtype=torch.int32),
        torch.tensor(mask, dtype=torch.uint8),
        torch.zeros(length, 3 * hidden),
        torch.zeros(teaching, hidden),
        torch.zeros(teaching, dtype=torch.int32),
        torch.zeros(teaching),
    )


def product(rows: int, inputs: int, outputs: int) -> int:
    """A multiplication and an addition for each element of input and output."""
    return 2 * rows * inputs * outputs


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_operations_equal_the_count_by_position(seed: int, everywhere: bool, latent: bool) -> None:
    rng = random.Random(seed)
    shape, steps = tiny_latent_shape() if latent else tiny_shape(), rng.randint(1, 4)
    h, d, i = shape.hidden_size, shape.draft_vocab_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    v, queries, keys = q, product(1, 2 * h, q), 2 * product(1, 2 * h, kv)
    if latent:  # rank 12 for queries, 10 for keys and values; widths 6 + 4 and 5
        v = 4 * 5
        queries = product(1, 2 * h, 12) + product(1, 12, 4 * (6 + 4))
        keys = product(1, 2 * h, 10 + 4) + product(1, 10, 4 * (6 + 5))
    samples = [sample(rng, h) for _ in range(rng.randint(1, 4))]
    expected = 0
    for one in samples:
        mask, length = one.loss_mask.tolist(), len(one.input_ids)
        taught = set()
        for t in range(length):
            expected += 2 * product(1, 3 * h, h)  # forward, and the weight's gradient
            expected += 3 * keys
            for k in range(steps):
                counts = t + 2 + k < length and all(mask[t + 1 : t + 3 + k])
                if not counts and not (everywhere and t + 1 + k < length):
                    continue
                expected += 3 * (queries + product(1, v, h) + 3 * product(1, h, i))
                if k:
                    expected += 3 * keys
                for _ in range(t + 1 + k):  # keys of the document so far, and its own of later steps
                    expected += 3 * (product(1, q, 1) + product(1, 1, v))
                if counts:
                    expected += 3 * product(1, h, d)
                    taught.add(t + 1 + k)
        expected += len(taught) * product(1, h, d)
    for multiple in (1, 16):
        pack = make_pack(samples, steps, everywhere=everywhere, multiple=multiple)
        assert pack_flops(shape, pack) == expected


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA A1000", None),
        ("", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
