"""The drafter: settings `drafter.*`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ray_eagle.config.section import Positive, Section, expand


class DrafterConfig(Section):
    """The drafter: one given, or the shape of the one to train."""

    path: Annotated[str | None, AfterValidator(expand)] = None
    """An existing drafter folder: probed first, and fine-tuned when it does not pay."""
    initial: Literal["target", "random"] = "target"
    """Where a drafter trained from scratch starts: head, final norm and last block of the target, or random weights."""
    architecture: Literal["llama", "mla"] = "llama"
    """Attention of a new drafter: grouped-query as in Llama, or latent as in DeepSeek and Kimi (`Eagle3DeepseekV2ForCausalLM`)."""
    intermediate_size: Positive | None = None
    """MLP width. Default: the target's."""
    num_attention_heads: Positive | None = None
    """Query heads. Default: the target's."""
    num_key_value_heads: Positive | None = None
    """Key and value heads (llama). Default: the target's."""
    head_dim: Positive | None = None
    """Width of one head (llama). Default: the target's."""
    q_lora_rank: Positive | None = None
    """Rank of the queries (mla). Default: the target's, which has to have one: SGLang needs it."""
    kv_lora_rank: Positive | None = None
    """Rank of keys and values (mla). Default: the target's."""
    qk_nope_head_dim: Positive | None = None
    """Width of a query and key without RoPE (mla). Default: the target's."""
    qk_rope_head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Width of the part with RoPE (mla). Default: the target's."""
    v_head_dim: Positive | None = None
    """Width of a value (mla), at most that of a query. Default: the target's."""

    @model_validator(mode="after")
    def _latent(self) -> "DrafterConfig":
        latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        named = [name for name in latent if getattr(self, name) is not None]
        if named and self.architecture != "mla":
            raise ValueError(f"{', '.join(named)}: only latent attention has it; set architecture to mla")
        return self
