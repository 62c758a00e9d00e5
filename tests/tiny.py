"""Tiny random models in Hugging Face form: a byte-level tokenizer with a chat template, and a Llama of any size."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.shape import DrafterShape

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
VOCAB = 256 + len(SPECIALS)


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
) -> Path:
    """A Llama with random weights (float32) and its tokenizer, saved to `folder`.

    A larger `scale` makes the next token depend more on the context, so that greedy text does not loop at once.
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
    tokenizer = tiny_tokenizer()
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = LlamaForCausalLM(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
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
