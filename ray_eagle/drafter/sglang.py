"""config.json of the drafter folder that SGLang loads, as it is written here."""

from typing import Any

from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.speculators import LAYERS
from ray_eagle.drafter.variant import ARCHITECTURE, LATENT


def sglang_config(shape: DrafterShape, dtype: str) -> dict[str, Any]:
    """RoPE in the new and the old keys, layer ids nested for SGLang and on top for vLLM. dtype: as PyTorch spells it (`bfloat16`)."""
    rope = dict(shape.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    attention = shape.latent.model_dump() if shape.latent else {"head_dim": shape.head_dim}
    return {
        "architectures": [LATENT if shape.latent else ARCHITECTURE],
        # not deepseek_v3, which vLLM takes for DeepSeek's own multi-token prediction; SGLang and vLLM know this one
        "model_type": "kimi_k2" if shape.latent else "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        **attention,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "eagle_config": {
            LAYERS: list(shape.aux_layers),
            "use_aux_hidden_state": True,
        },
        LAYERS: list(shape.aux_layers),
    }
