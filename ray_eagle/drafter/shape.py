"""What a drafter's tensors look like: the numbers of its config, and the tensors that follow from them."""

import math
from typing import Any

from pydantic import BaseModel, ConfigDict

from ray_eagle.target.sizes import LatentSizes


class DrafterShape(BaseModel):
    """Sizes and constants of an EAGLE-3 drafter with one layer: Llama's, or with DeepSeek's latent attention."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of a query and of a key."""
    vocab_size: int
    """V: the target's vocabulary, padding rows included."""
    draft_vocab_size: int
    """D."""
    aux_layers: tuple[int, int, int]
    """Output-of-layer ids, ascending."""
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    """As in transformers 5: `rope_type`, `rope_theta` and what the type needs."""
    max_position_embeddings: int = 2048
    latent: LatentSizes | None = None
    """Of latent attention (MLA), where `head_dim` is its `qk_head_dim` and every head has a key; else None."""

    @property
    def value_dim(self) -> int:
        """Width of a value."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @property
    def rotated_dim(self) -> int:
        """Of a query's and key's coordinates, the last ones that RoPE turns."""
        return self.latent.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied with; in latent attention YaRN's `mscale_all_dim` adds to it (DeepSeek-V2)."""
        scale, factor = self.head_dim**-0.5, self.rope_parameters.get("factor") or 1.0
        if self.latent and factor > 1:
            scale *= (0.1 * self.rope_parameters.get("mscale_all_dim", 0.0) * math.log(factor) + 1.0) ** 2
        return scale

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor in the SGLang checkpoint, d2t and t2d included, embed_tokens left out."""
        h, i, d = self.hidden_size, self.intermediate_size, self.draft_vocab_size
        return {
            "fc.weight": (h, 3 * h),
            "midlayer.input_layernorm.weight": (h,),
            "midlayer.hidden_norm.weight": (h,),
            "midlayer.post_attention_layernorm.weight": (h,),
            **{f"midlayer.self_attn.{name}.weight": size for name, size in self._attention().items()},
            "midlayer.mlp.gate_proj.weight": (i, h),
            "midlayer.mlp.up_proj.weight": (i, h),
            "midlayer.mlp.down_proj.weight": (h, i),
            "norm.weight": (h,),
            "lm_head.weight": (d, h),
            "d2t": (d,),
            "t2d": (self.vocab_size,),
        }

    def _attention(self) -> dict[str, tuple[int, ...]]:
        """Tensors of the attention, the matrices that read its input [.., 2H] among them."""
        h, heads, sizes = self.hidden_size, self.num_attention_heads, self.latent
        q, kv, o = heads * self.head_dim, self.num_key_value_heads * self.head_dim, (h, heads * self.value_dim)
        if sizes is None:
            return {"q_proj": (q, 2 * h), "k_proj": (kv, 2 * h), "v_proj": (kv, 2 * h), "o_proj": o}
        if (rank := sizes.q_lora_rank) is None:
            queries: dict[str, tuple[int, ...]] = {"q_proj": (q, 2 * h)}
        else:
            queries = {"q_a_proj": (rank, 2 * h), "q_a_layernorm": (rank,), "q_b_proj": (q, rank)}
        rank = sizes.kv_lora_rank
        return queries | {
            "kv_a_proj_with_mqa": (rank + sizes.qk_rope_head_dim, 2 * h),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), rank),
            "o_proj": o,
        }
