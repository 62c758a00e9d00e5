"""RoPE of every scaling that a drafter may have: as transformers rotates."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ray_eagle.drafter.model import Drafter, rotate_half
from ray_eagle.drafter.shape import DrafterShape
from tests.tiny import tiny_shape

BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, **BANDS}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 16.0, **BETAS}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rotation_equals_that_of_transformers(rope: dict[str, Any]) -> None:
    shape = DrafterShape(**(tiny_shape().model_dump() | {"rope_parameters": rope, "max_position_embeddings": 1024}))
    drafter = Drafter(shape)
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1024,
        rope_parameters=dict(rope),
    )
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.cat(
        [torch.arange(20), torch.randint(20, 1024, (30,), generator=torch.Generator().manual_seed(0))]
    )
    x_TAE = torch.randn(len(positions), 4, shape.head_dim, generator=torch.Generator().manual_seed(1))
    cos, sin = rotary(x_TAE, positions[None])
    torch.testing.assert_close(drafter.inverse_frequencies.float(), rotary.inv_freq, rtol=1e-6, atol=0)
    assert drafter.rope_scale == pytest.approx(rotary.attention_scaling)
    angles = positions[:, None] * drafter.inverse_frequencies
    torch.testing.assert_close(
        (torch.cos(angles) * drafter.rope_scale).float(), cos[0, :, : shape.head_dim // 2], rtol=0, atol=2e-4
    )
    expected, _ = apply_rotary_pos_emb(x_TAE.transpose(0, 1)[None], x_TAE.transpose(0, 1)[None], cos, sin)
    turned_TAE = rotate_half(x_TAE, *drafter.rotary(positions, x_TAE.dtype))
    torch.testing.assert_close(turned_TAE, expected[0].transpose(0, 1), rtol=0, atol=5e-4)


def test_scaled_kinds_of_rope_differ_from_the_default() -> None:
    frequencies = {
        name: Drafter(
            tiny_shape().model_copy(update={"rope_parameters": rope | {"rope_theta": 1e4}})
        ).inverse_frequencies
        for name, rope in ROPES.items()
    }
    for name in ("llama3", "yarn", "linear"):
        assert not torch.allclose(frequencies[name], frequencies["default"], rtol=1e-2)
    assert Drafter(tiny_shape().model_copy(update={"rope_parameters": YARN})).rope_scale > 1
