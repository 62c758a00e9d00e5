"""What a drafter's tensors look like: the numbers of its config, and the tensors that follow from them."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class DrafterShape(BaseModel):
    """Sizes and constants of an EAGLE-3 drafter with one Llama layer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
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

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor in the SGLang checkpoint, d2t and t2d included, embed_tokens left out."""
        h, i, d = self.hidden_size, self.intermediate_size, self.draft_vocab_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "fc.weight": (h, 3 * h),
            "midlayer.input_layernorm.weight": (h,),
            "midlayer.hidden_norm.weight": (h,),
            "midlayer.post_attention_layernorm.weight": (h,),
            "midlayer.self_attn.q_proj.weight": (q, 2 * h),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.o_proj.weight": (h, q),
            "midlayer.mlp.gate_proj.weight": (i, h),
            "midlayer.mlp.up_proj.weight": (i, h),
            "midlayer.mlp.down_proj.weight": (h, i),
            "norm.weight": (h,),
            "lm_head.weight": (d, h),
            "d2t": (d,),
            "t2d": (self.vocab_size,),
        }
