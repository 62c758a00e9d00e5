"""Tiny random models in Hugging Face form: a byte-level tokenizer with a chat template, a Llama of any size, a Qwen3-MoE
and a DeepSeek-V3."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.target.sizes import LatentSizes

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
VOCAB = 256 + len(SPECIALS)
ONE_FILE = "1GB"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
}
"""Settings that most families spell alike."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIALS[2:]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_target(
    folder: Path,
    *,
    layers: int = 8,
    hidden: int = 32,
    seed: int = 0,
    tie: bool = False,
    scale: float = 0.2,
    context: int = 512,
    shard: str = ONE_FILE,
) -> Path:
    """A Llama with random weights (float32) and its tokenizer, saved to `folder`.

    A larger `scale` makes the next token depend more on the context, so that greedy text does not loop at once. `shard`
    is the largest file of a checkpoint in several files.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tie,
        initializer_range=scale,
        eos_token_id=VOCAB - 4,
        pad_token_id=VOCAB - 5,
        bos_token_id=None,
    )
    return save(LlamaForCausalLM(config), folder, shard)


def tiny_qwen3_moe(folder: Path, *, layers: int = 8, seed: int = 0, tie: bool = False, shard: str = ONE_FILE) -> Path:
    """8 experts, 2 a token, in every layer but the first; grouped queries with norms."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        initializer_range=0.2,
    )
    return save(Qwen3MoeForCausalLM(config), folder, shard)


def tiny_deepseek_v3(folder: Path, *, layers: int = 8, seed: int = 0, tie: bool = False, shard: str = ONE_FILE) -> Path:
    """Latent attention whose values are narrower than its queries, YaRN, two dense layers, then grouped and shared experts."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        initializer_range=0.2,
    )
    model = DeepseekV3ForCausalLM(config)
    for layer in model.model.layers[2:]:
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.1)
    return save(model, folder, shard)


def save(model: Any, folder: Path, shard: str) -> Path:
    """In float32, with the tokenizer and its ids."""
    tokenizer = tiny_tokenizer()
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.float().save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_shape(
    *, hidden: int = 32, vocab: int = VOCAB, draft_vocab: int = 128, aux_layers: tuple[int, int, int] = (1, 3, 4)
) -> DrafterShape:
    """A drafter shape that fits `tiny_target`; head_dim differs from hidden / heads on purpose."""
    return DrafterShape(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 2,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        aux_layers=aux_layers,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
    )


def tiny_latent_shape(
    *, q_lora_rank: int | None = 12, rope: dict[str, Any] | None = None, **shape: Any
) -> DrafterShape:
    """As `tiny_shape`, with latent attention, no two of whose sizes are the same."""
    latent = LatentSizes(q_lora_rank=q_lora_rank, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    plain = tiny_shape(**shape)
    sizes = {"latent": latent, "head_dim": 10, "num_key_value_heads": 4}
    return plain.model_copy(update=sizes | ({"rope_parameters": rope} if rope else {}))


def tiny_drafter(shape: DrafterShape, *, seed: int = 0) -> Drafter:
    """Random weights and a random vocabulary map."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(shape)
    for parameter in drafter.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() == 2 else 0.1) + (
            parameter.dim() == 1
        )
    ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    drafter.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.t2d[ids] = True
    return drafter
