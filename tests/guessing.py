"""A tiny target and a drafter that is right now and then, without any training.

The target's next token depends on the current one alone (its layers add nothing), so a drafter that passes on the state
it hears can look up the token after the next in its head: its first guess is often right, its later ones are not.
"""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from ray_eagle.drafter.checkpoint import save_drafter
from tests.tiny import VOCAB, tiny_drafter, tiny_shape, tiny_target, tiny_tokenizer

SILENT = ("o_proj", "down_proj")


@torch.no_grad()
def guessing_pair(folder: Path) -> tuple[Path, Path]:
    """Folders of the target (float32, context 8192) and of its drafter."""
    target = tiny_target(folder / "target", seed=2, context=8192)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if any(part in name for part in SILENT):
            parameter.zero_()
    model.save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)

    embedding_VH = model.get_input_embeddings().weight
    following_V = model(input_ids=torch.arange(VOCAB)[:, None]).logits[:, 0].argmax(-1)
    drafter = tiny_drafter(tiny_shape(), seed=2)
    for name, parameter in drafter.named_parameters():
        if any(part in name for part in (*SILENT, "fc.", "lm_head")):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
    drafter.fc.weight[:, : embedding_VH.shape[1]] = torch.eye(embedding_VH.shape[1])
    row_of = {int(token): row for row, token in enumerate(drafter.target_ids.tolist())}
    for token, after in enumerate(following_V[following_V].tolist()):
        if after in row_of:
            drafter.lm_head.weight[row_of[after]] += embedding_VH[token] / embedding_VH[token].norm()
    save_drafter(drafter, folder / "drafter", torch.float32)
    return target, folder / "drafter"
