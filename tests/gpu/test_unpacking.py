"""On an NVIDIA GPU: packed weights unpacked by one compiled kernel, bit for bit as step by step on the CPU."""

from pathlib import Path

import pytest
import torch

from ray_eagle.target.packed import packing_of
from ray_eagle.target.unpacking import ONE_PASS_INT4, ONE_PASS_SCALED
from tests.packing import KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_on_the_gpu_is_the_same_bit_for_bit(kind: str) -> None:
    quantise, config = KINDS[kind]
    packing = packing_of({"quantization_config": config}, Path())
    assert packing is not None
    for seed, columns in enumerate((48, 96, 48)):
        torch.manual_seed(seed)
        parts, twin = quantise(torch.randn(40 + 8 * seed, columns))
        weight, scale = parts[packing.weight], parts[packing.scale]
        scale = scale.reshape(1, 1).expand(len(weight), 1) if scale.numel() == 1 else scale
        for stacked in (1, 3):  # experts
            pair = (torch.stack([tensor] * stacked).cuda() for tensor in (weight, scale))
            with torch.inference_mode():
                found = packing.unpack(*pair).cpu()
            assert found.dtype == torch.bfloat16 and all(torch.equal(one, twin) for one in found)
    assert not ONE_PASS_INT4.fails
    assert not ONE_PASS_SCALED.fails or torch.cuda.get_device_capability() < (8, 9), "no 8-bit types before"
