"""The embedded generator: batched decoding through transformers, exact output ids, reproducible batch by batch."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ray_eagle.target.cache import growing_cache


@dataclass(frozen=True)
class Answer:
    """What the target wrote: token ids exactly as generated, end-of-turn token included."""

    ids: list[int]
    finish_reason: Literal["stop", "length"]


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer: the generation config's, and the tokenizer's end of sequence."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


@torch.inference_mode()
def generate_batch(
    model: Any,
    prompts: list[list[int]],
    *,
    eos: list[int],
    pad: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> list[Answer]:
    """Answers of one left-padded batch. Greedy at temperature 0; sampled text depends on the seed and the batch alone."""
    width = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), width), pad, device=model.device)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.tensor(prompt, device=model.device)
        mask_BT[row, width - len(prompt) :] = 1
    torch.manual_seed(seed)
    greedy: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    sampled = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    output_BT = model.generate(
        ids_BT,
        attention_mask=mask_BT,
        past_key_values=growing_cache(model.config),
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=pad,
        **(sampled if temperature > 0 else greedy),
    )
    return [_cut(row, eos) for row in output_BT[:, width:].tolist()]


def _cut(ids: list[int], eos: list[int]) -> Answer:
    """Up to and including the first end-of-turn token; what follows is padding."""
    end = next((i for i, token in enumerate(ids) if token in eos), None)
    return Answer(ids, "length") if end is None else Answer(ids[: end + 1], "stop")
