"""A tiny random model of each target family: name -> a function that saves it, with tokenizer, to a folder.

8 layers, hidden size 32, float32; norm weights and biases are random too, so that a forgotten one shows. Windows are 8 tokens.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny import ONE_FILE, SHAPE, save, tiny_deepseek_v3, tiny_qwen3_moe, tiny_target

WINDOW = 8
LAYERS = 8
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
GEMMA = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": SLIDING, "query_pre_attn_scalar": 8}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def _build(folder: Path, config: Any, seed: int, shard: str) -> Path:
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (1.0 if name.endswith("sinks") else 0.1))
        for module in model.modules():  # an expert's share depends on it
            if isinstance(getattr(module, "e_score_correction_bias", None), torch.Tensor):
                module.e_score_correction_bias.normal_(std=0.1)
    return save(model, folder, shard)


def _family(config_class: Any, tied: bool = False, **special: Any) -> Callable[..., Path]:
    def build(folder: Path, *, seed: int = 0, tie: bool = tied, shard: str = ONE_FILE) -> Path:
        return _build(folder, config_class(**SHAPE, **special, tie_word_embeddings=tie), seed, shard)

    return build


def tiny_kimi_k25(folder: Path, *, seed: int = 0, tie: bool = False, shard: str = ONE_FILE) -> Path:
    """Names and nested config as in the public checkpoint (as transformers saves it, its layers are called `blocks`)."""
    text = transformers.AutoConfig.from_pretrained(tiny_deepseek_v3(folder)).to_dict() | {"tie_word_embeddings": tie}
    shutil.rmtree(folder)
    vision = VISION | {"pos_emb_height": 4, "pos_emb_width": 4}
    config = transformers.Kimi_K25Config(
        text_config=text, vision_config=vision, projection_hidden_size=16, tie_word_embeddings=tie
    )
    _build(folder, config, seed, shard)
    for file in folder.glob("*.safetensors*"):
        if file.suffix == ".json":
            file.write_text(file.read_text().replace("language_model.model.blocks.", "language_model.model.layers."))
        else:
            tensors = load_file(file)
            named = {
                name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
                for name, tensor in tensors.items()
            }
            save_file(named, file, {"format": "pt"})
    saved = json.loads((folder / "config.json").read_text())
    saved["text_config"]["model_type"] = "kimi_k2"
    (folder / "config.json").write_text(json.dumps(saved))
    return folder


def tiny_gemma3(folder: Path, *, seed: int = 0, tie: bool = True, shard: str = ONE_FILE) -> Path:
    """A vision tower, a bridge, and a nested config that, as the public ones, does not say what is a default."""
    text = SHAPE | GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4}
    vision = VISION | {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=tie
    )
    _build(folder, config, seed, shard)
    saved = json.loads((folder / "config.json").read_text())
    usual = transformers.Gemma3TextConfig().to_dict()
    kept = {k: v for k, v in saved["text_config"].items() if k == "model_type" or usual.get(k, ...) != v}
    (folder / "config.json").write_text(json.dumps(saved | {"text_config": kept}))
    return folder


FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": tiny_target,
    "qwen2": _family(
        transformers.Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=LAYERS // 2
    ),
    "qwen3": _family(transformers.Qwen3Config, head_dim=16),
    "qwen3_moe": tiny_qwen3_moe,
    "deepseek_v3": tiny_deepseek_v3,
    "kimi_k25": tiny_kimi_k25,
    "glm4_moe": _family(
        transformers.Glm4MoeConfig,
        **EXPERTS,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        head_dim=8,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "gpt_oss": _family(
        transformers.GptOssConfig,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=SLIDING,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    ),
    "gemma2": _family(
        transformers.Gemma2Config,
        **GEMMA,
        tied=True,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
    ),
    "gemma3_text": _family(transformers.Gemma3TextConfig, tied=True, **GEMMA),
    "gemma3": tiny_gemma3,
    "mistral": _family(transformers.MistralConfig, sliding_window=WINDOW),
    "cohere": _family(transformers.CohereConfig, logit_scale=0.25, use_qk_norm=True),
    "granite": _family(
        transformers.GraniteConfig,
        logits_scaling=3.0,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
    ),
}
