"""The EAGLE-3 drafter as a torch module: one layer, Llama's or DeepSeek's, over [embedding, fused aux states].

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


def rotate_pairs(x_TAE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """`rotate_half` of coordinates that are rotated with their neighbours (0 with 1, 2 with 3), as DeepSeek lays them out.

    In the result the firsts of all pairs come first, which no product of a query with a key notices.
    """
    return rotate_half(torch.cat([x_TAE[..., 0::2], x_TAE[..., 1::2]], dim=-1), cos_TE, sin_TE)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention up to queries, keys and values; how they meet is the caller's (training, or a cache)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        h, e = shape.hidden_size, shape.head_dim
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, e
        self.q_proj = nn.Linear(2 * h, self.heads * e, bias=False)
        self.k_proj = nn.Linear(2 * h, self.kv_heads * e, bias=False)
        self.v_proj = nn.Linear(2 * h, self.kv_heads * e, bias=False)
        self.o_proj = nn.Linear(self.heads * e, h, bias=False)

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """Those that read the attention's input, the one of the queries first."""
        return self.q_proj, self.k_proj, self.v_proj

    def queries(self, input_T2: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """[T, A, E], rotated."""
        q_TAE = self.q_proj(input_T2).unflatten(-1, (self.heads, self.head_dim))
        return rotate_half(q_TAE, cos_TE, sin_TE)

    def keys_values(self, input_T2: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Two [T, G, E]: keys, rotated, and values."""
        k_TGE, v_TGE = (p(input_T2).unflatten(-1, (self.kv_heads, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return rotate_half(k_TGE, cos_TE, sin_TE), v_TGE


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA; DeepSeek-V2, 2024), expanded: each head has a query, a key and a narrower value.

    Queries, and keys with values, come through a normed vector of low rank. RoPE turns the end of a query, and one vector
    a position that all its keys end with.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        assert shape.latent is not None
        wide, self.heads, self.sizes = 2 * shape.hidden_size, shape.num_attention_heads, shape.latent
        self.ranks = (self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim)
        queries = self.heads * shape.head_dim
        if rank := self.sizes.q_lora_rank:
            self.q_a_proj = nn.Linear(wide, rank, bias=False)
            self.q_a_layernorm = RMSNorm(rank, shape.rms_norm_eps)
            self.q_b_proj = nn.Linear(rank, queries, bias=False)
        else:
            self.q_proj = nn.Linear(wide, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(wide, sum(self.ranks), bias=False)
        self.kv_a_layernorm = RMSNorm(self.ranks[0], shape.rms_norm_eps)
        expanded = self.heads * (self.sizes.qk_nope_head_dim + self.sizes.v_head_dim)
        self.kv_b_proj = nn.Linear(self.ranks[0], expanded, bias=False)
        self.o_proj = nn.Linear(self.heads * self.sizes.v_head_dim, shape.hidden_size, bias=False)

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """Those that read the attention's input, the one of the queries first."""
        return self.q_a_proj if self.sizes.q_lora_rank else self.q_proj, self.kv_a_proj_with_mqa

    def queries(self, input_T2: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """[T, A, E], the end of each rotated."""
        down_TR = self.projections[0](input_T2)
        q_TD = self.q_b_proj(self.q_a_layernorm(down_TR)) if self.sizes.q_lora_rank else down_TR
        return latent_queries(q_TD, cos_TE, sin_TE, self.sizes.qk_nope_head_dim)

    def keys_values(self, input_T2: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> tuple[Tensor, Tensor]:
        """[T, A, E] keys, the end of each rotated, and narrower values."""
        sizes = self.sizes
        down_TR, shared_TR = self.kv_a_proj_with_mqa(input_T2).split(self.ranks, dim=-1)
        kv_TD = self.kv_b_proj(self.kv_a_layernorm(down_TR))
        return latent_keys_values(kv_TD, shared_TR, cos_TE, sin_TE, sizes.qk_nope_head_dim, sizes.v_head_dim)


def latent_queries(q_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor, kept: int) -> Tensor:
    """[T, A, E] of the queries' product: the first `kept` coordinates of each as they are, the others rotated."""
    q_TAE = q_TD.unflatten(-1, (-1, kept + 2 * cos_TE.shape[-1]))
    turned = rotate_pairs(q_TAE[..., kept:], cos_TE, sin_TE).to(q_TD.dtype)
    return torch.cat([q_TAE[..., :kept], turned], dim=-1)


def latent_keys_values(
    kv_TD: Tensor, shared_TR: Tensor, cos_TE: Tensor, sin_TE: Tensor, kept: int, width: int
) -> tuple[Tensor, Tensor]:
    """Keys [T, A, E] and values [T, A, width] of the expanded product; `shared_TR`, rotated, ends every key."""
    kept_TAE, values_TAE = kv_TD.unflatten(-1, (-1, kept + width)).split((kept, width), dim=-1)
    turned = rotate_pairs(shared_TR[:, None], cos_TE, sin_TE).to(kv_TD.dtype)
    return torch.cat([kept_TAE, turned.expand(-1, kept_TAE.shape[1], -1)], dim=-1), values_TAE.contiguous()


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
        self.self_attn: Attention | LatentAttention = LatentAttention(shape) if shape.latent else Attention(shape)
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
        return self.midlayer.self_attn.queries(attention_input_T2, *self.rotary(positions_T, attention_input_T2.dtype))

    def keys_values(self, attention_input_T2: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Two [T, G, E]: keys, rotated to the positions, and values (narrower in latent attention)."""
        rotary = self.rotary(positions_T, attention_input_T2.dtype)
        return self.midlayer.self_attn.keys_values(attention_input_T2, *rotary)

    def finish(self, hidden_TH: Tensor, attended_TAE: Tensor) -> Tensor:
        """[T, H]: the layer's un-normed output u, from its residual input and what the heads attended to."""
        y_TH = hidden_TH + self.midlayer.self_attn.o_proj(attended_TAE.flatten(-2))
        return y_TH + self.midlayer.mlp(self.midlayer.post_attention_layernorm(y_TH))

    def logits(self, output_TH: Tensor) -> Tensor:
        """[T, D]: scores of the draft vocabulary from the un-normed output."""
        return self.lm_head(self.norm(output_TH))

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
        exponents = torch.arange(0, shape.rotated_dim, 2, dtype=torch.float64) / shape.rotated_dim
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
        head_dim=shape.rotated_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=dict(shape.rope_parameters),
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.double(), float(scale)
