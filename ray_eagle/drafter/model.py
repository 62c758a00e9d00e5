"""The EAGLE-3 drafter as a torch module: one Llama-style layer over [embedding, fused aux states].

Parameter names are those of the SGLang checkpoint. Conventions: EAGLE-3 (Li et al., 2025), as served by SGLang. Position
t pairs the aux states of token t with the embedding of token t+1 and predicts token t+2. The un-normed output is the
next draft step's hidden input.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.errors import CheckpointError, explain


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, computed in float32 (or float64 for float64 input), in the dtype of x."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight_H.to(wide.dtype)).to(x.dtype)


def rotate_half(x_TAE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotary position embedding of the "rotate half" kind; cos and sin are [T, E/2], one row a token."""
    first, second = x_TAE.chunk(2, dim=-1)
    cos, sin = cos_TE[:, None], sin_TE[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """The four projections; how keys meet queries is decided by the caller (training, or a key/value cache)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        h, e = shape.hidden_size, shape.head_dim
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, e
        self.q_proj = nn.Linear(2 * h, self.heads * e, bias=False)
        self.k_proj = nn.Linear(2 * h, self.kv_heads * e, bias=False)
        self.v_proj = nn.Linear(2 * h, self.kv_heads * e, bias=False)
        self.o_proj = nn.Linear(self.heads * e, h, bias=False)


class MLP(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Midlayer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)


class Drafter(nn.Module):
    """The drafter's weights and the pieces of its forward pass."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        self.inverse_frequencies, self.rope_scale = rope_frequencies(shape)

    @property
    def target_ids(self) -> Tensor:
        """[D] int64: the target token that each draft token stands for (d2t holds offsets)."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def project(self, aux_TC: Tensor) -> Tensor:
        """[T, 3H] -> [T, H]: fuse three aux hidden states into the hidden input of step 0."""
        return self.fc(aux_TC)

    def attention_input(self, hidden_TH: Tensor, embedding_TH: Tensor) -> Tensor:
        """[T, 2H]: normed embedding first, normed hidden state second."""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embedding_TH), layer.hidden_norm(hidden_TH)], dim=-1)

    def queries(self, attention_input_T2: Tensor, positions_T: Tensor) -> Tensor:
        """[T, A, E], rotated to the positions."""
        attention = self.midlayer.self_attn
        q_TAE = attention.q_proj(attention_input_T2).unflatten(-1, (attention.heads, attention.head_dim))
        return self.rotate(q_TAE, positions_T)

    def keys_values(self, attention_input_T2: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Two [T, G, E]: keys, rotated to the positions, and values."""
        attention = self.midlayer.self_attn
        k_TGE = attention.k_proj(attention_input_T2).unflatten(-1, (attention.kv_heads, attention.head_dim))
        v_TGE = attention.v_proj(attention_input_T2).unflatten(-1, (attention.kv_heads, attention.head_dim))
        return self.rotate(k_TGE, positions_T), v_TGE

    def finish(self, hidden_TH: Tensor, attended_TAE: Tensor) -> Tensor:
        """[T, H]: the layer's un-normed output u, from its residual input and what the heads attended to."""
        y_TH = hidden_TH + self.midlayer.self_attn.o_proj(attended_TAE.flatten(-2))
        return y_TH + self.midlayer.mlp(self.midlayer.post_attention_layernorm(y_TH))

    def logits(self, output_TH: Tensor) -> Tensor:
        """[T, D]: scores of the draft vocabulary from the un-normed output."""
        return self.lm_head(self.norm(output_TH))

    def rotate(self, x_TAE: Tensor, positions_T: Tensor) -> Tensor:
        """Rotary position embedding over the last dimension."""
        return rotate_half(x_TAE, *self.rotary(positions_T, x_TAE.dtype))

    def rotary(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two [T, E/2]: cos and sin of each position's angles, taken in float64."""
        angles_TE = positions_T.double()[:, None] * self.inverse_frequencies.to(positions_T.device)
        return (angles_TE.cos() * self.rope_scale).to(dtype), (angles_TE.sin() * self.rope_scale).to(dtype)


def rope_frequencies(shape: DrafterShape) -> tuple[Tensor, float]:
    """[E/2] float64 inverse frequencies and the scale of cos and sin, for any RoPE kind that transformers knows.

    Raises CheckpointError for another one.
    """
    kind = shape.rope_parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        return float(shape.rope_parameters["rope_theta"]) ** -exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = ["default", *ROPE_INIT_FUNCTIONS]
    if kind not in known:
        fix = "Correct rope_parameters in config.json."
        raise CheckpointError(explain("RoPE", where="rope_type", expected=" or ".join(known), found=kind, fix=fix))
    config = LlamaConfig(
        hidden_size=shape.num_attention_heads * shape.head_dim,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=dict(shape.rope_parameters),
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.double(), float(scale)
