"""How a new drafter starts: from the target, from random weights, or from an existing drafter."""

from pathlib import Path

import torch
from torch import Tensor

from ray_eagle.config import DrafterConfig
from ray_eagle.drafter.checkpoint import check_fits, load_drafter
from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.errors import CheckpointError
from ray_eagle.target.loading import TargetFacts, head_and_embedding

INITIAL_STD = 0.02


def new_shape(settings: DrafterConfig, facts: TargetFacts, draft_vocab_size: int) -> DrafterShape:
    """The shape of a drafter for this target: its sizes where the settings name none, its RoPE and its context."""
    return DrafterShape(
        hidden_size=facts.hidden_size,
        intermediate_size=settings.intermediate_size or facts.intermediate_size,
        num_attention_heads=settings.num_attention_heads or facts.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads or facts.num_key_value_heads,
        head_dim=settings.head_dim or facts.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=min(draft_vocab_size, facts.vocab_size),
        aux_layers=facts.aux_layers,
        rms_norm_eps=facts.rms_norm_eps,
        rope_parameters=facts.rope_parameters,
        max_position_embeddings=facts.max_position_embeddings,
    )


def random_drafter(shape: DrafterShape, seed: int) -> Drafter:
    """Random weights (normal, 0.02; norms 1) and a map of the lowest D ids."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(shape)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=INITIAL_STD, generator=generator)
    drafter.t2d[: shape.draft_vocab_size] = True
    return drafter


def start_drafter(settings: DrafterConfig, facts: TargetFacts, d2t: Tensor, t2d: Tensor, seed: int) -> Drafter:
    """The float32 drafter that training starts from, with the map d2t [D] and t2d [V].

    An existing drafter keeps its map, since its head rows belong to it; raises CheckpointError if the map differs, or the layers that it listens to.
    """
    if settings.path:
        drafter = load_drafter(Path(settings.path).expanduser())
        check_fits(
            drafter.shape,
            hidden_size=facts.hidden_size,
            vocab_size=facts.vocab_size,
            layers=facts.layers,
            where=settings.path,
            captured=facts.aux_layers,
        )
        if not torch.equal(drafter.d2t, d2t):
            raise CheckpointError(
                f"drafter {settings.path}: expected the vocabulary map of the run, found another one. Its head rows belong "
                "to its own map: run `ray-eagle vocab --redo`, which takes it over."
            )
        return drafter
    drafter = random_drafter(new_shape(settings, facts, len(d2t)), seed)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    if settings.initial == "target":
        head_VH, _, norm_H = head_and_embedding(facts)
        with torch.no_grad():
            drafter.lm_head.weight.copy_(head_VH[drafter.target_ids])
            drafter.norm.weight.copy_(norm_H)
    return drafter
