"""How a new drafter starts: from the target, from random weights, or from an existing drafter."""

from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from ray_eagle.config import DrafterConfig
from ray_eagle.drafter.checkpoint import check_fits, load_drafter
from ray_eagle.drafter.contents import check_map
from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.errors import CheckpointError, ConfigError
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.hidden_states.schema import AUX_LAYERS, aux_states
from ray_eagle.target.families import family_of
from ray_eagle.target.loading import UNPACKED, TargetFacts, head_and_embedding, read_target_tensor
from ray_eagle.target.sizes import LatentSizes

INITIAL_STD = 0.02
FUSED_RMS = 0.6
"""Root mean square of the fused aux states that a drafter from scratch starts with."""
ROWS = 256
"""Tokens whose aux states are made into float64 at once: a sample may have a hundred thousand."""
LATENT_ROPES = ("default", "yarn")
"""What engines read of latent attention: they take every scaled RoPE for YaRN. Of another kind only the base is kept."""


def new_shape(settings: DrafterConfig, facts: TargetFacts, draft_vocab_size: int) -> DrafterShape:
    """The shape of a drafter for this target: its sizes where the settings name none, its RoPE and its context.

    Raises ConfigError for latent attention whose sizes neither states.
    """
    latent = _latent_sizes(settings, facts) if settings.architecture == "mla" else None
    heads = settings.num_attention_heads or facts.num_attention_heads
    # a drafter turns whole heads, whatever share of them the target turns (GLM)
    rope = {key: value for key, value in facts.rope.items() if key != "partial_rotary_factor"}
    if latent and rope.get("rope_type") not in LATENT_ROPES:
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return DrafterShape(
        hidden_size=facts.hidden_size,
        intermediate_size=settings.intermediate_size or facts.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=heads if latent else settings.num_key_value_heads or facts.num_key_value_heads,
        head_dim=latent.qk_head_dim if latent else settings.head_dim or facts.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=min(draft_vocab_size, facts.vocab_size),
        aux_layers=facts.aux_layers,
        rms_norm_eps=facts.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=facts.max_position_embeddings,
        latent=latent,
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


def start_drafter(
    settings: DrafterConfig,
    facts: TargetFacts,
    d2t: Tensor,
    t2d: Tensor,
    seed: int,
    channel_rms_C: Tensor | None = None,
    *,
    reindex: bool = False,
) -> Drafter:
    """The float32 drafter that training starts from, with the map d2t [D] and t2d [V].

    channel_rms_C: [3H] root mean square of each aux channel; a drafter from scratch then sees every channel at the same
    size, though targets have a few that are a hundred times larger than the rest.
    An existing drafter keeps its map, since its head rows belong to it; with `reindex` its rows move to another one.
    Raises CheckpointError if the map differs without it, or the layers that the drafter listens to.
    """
    if settings.path:
        return _given_drafter(settings.path, facts, d2t, t2d, reindex)
    drafter = random_drafter(new_shape(settings, facts, len(d2t)), seed)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    with torch.no_grad():
        if channel_rms_C is not None:
            generator = torch.Generator().manual_seed(seed)
            drafter.fc.weight.normal_(std=FUSED_RMS * len(channel_rms_C) ** -0.5, generator=generator)
            drafter.fc.weight.div_(channel_rms_C)
        if settings.initial == "target":
            _copy_from_target(drafter, facts)
    return drafter


def channel_rms(samples: HiddenStates, most: int = 64) -> Tensor:
    """[3H] root mean square of each aux channel over the first samples, without the first token.

    (Targets keep a huge state there, whatever the token is.) Samples of one token alone give ones.
    """
    sum_C, count = torch.zeros(AUX_LAYERS * samples.plan.hidden_size, dtype=torch.float64), 0
    for sample in (samples[i] for i in range(min(most, len(samples)))):
        for part in (slice(at, at + ROWS) for at in range(1, len(sample.aux), ROWS)):
            aux_TC = aux_states(sample.aux[part], None if sample.aux_scale is None else sample.aux_scale[part])
            sum_C += aux_TC.double().square().sum(0)
            count += len(aux_TC)
    return (sum_C / count).sqrt().float().clamp(min=1e-3) if count else torch.ones(len(sum_C))


def move_rows(drafter: Drafter, d2t: Tensor, t2d: Tensor, head_VH: Tensor) -> Drafter:
    """The drafter with another map, d2t [D'] and t2d [V]: rows of lm_head move to their token's new place.

    A token that it could not say before starts with its row of the target's head [V, H]. Logits of the tokens that both
    maps hold stay what they were, bit for bit. The one way to change the map of a drafter that has learnt: a map alone,
    over old rows, trains without complaint and drafts the wrong tokens.
    """
    moved = Drafter(drafter.shape.model_copy(update={"draft_vocab_size": len(d2t)}))
    kept = {
        name: tensor for name, tensor in drafter.state_dict().items() if name not in ("lm_head.weight", "d2t", "t2d")
    }
    ids_D = torch.arange(len(d2t)) + d2t
    row_V = torch.full((len(t2d),), -1, dtype=torch.int64)
    row_V[drafter.target_ids] = torch.arange(len(drafter.d2t))
    before_D = row_V[ids_D]
    head_DH = head_VH[ids_D].to(drafter.lm_head.weight.dtype)
    head_DH[before_D >= 0] = drafter.lm_head.weight.detach()[before_D[before_D >= 0]]
    moved.load_state_dict({**kept, "lm_head.weight": head_DH, "d2t": d2t, "t2d": t2d})
    return moved


def _latent_sizes(settings: DrafterConfig, facts: TargetFacts) -> LatentSizes:
    own = facts.latent.model_dump() if facts.latent else {}
    sizes = {name: getattr(settings, name) or own.get(name) for name in LatentSizes.model_fields}
    if missing := [f"drafter.{name}" for name, size in sizes.items() if size is None]:
        raise ConfigError(
            f"drafter.architecture mla: expected the sizes of latent attention, found no {', '.join(missing)}, neither in "
            f"the settings nor in the target ({facts.model_type}). Set them (DeepSeek-V3 and Kimi have 1536, 512, 128, 64 "
            "and 128), or leave drafter.architecture at llama."
        )
    try:
        return LatentSizes.model_validate(sizes)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"drafter.{wrong['loc'][0]}: {wrong['msg']}, found {wrong['input']}.") from None


def _given_drafter(path: str, facts: TargetFacts, d2t: Tensor, t2d: Tensor, reindex: bool) -> Drafter:
    drafter = load_drafter(Path(path))
    check_fits(
        drafter.shape,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        layers=facts.layers,
        where=path,
        captured=facts.aux_layers,
    )
    if torch.equal(drafter.d2t, d2t):
        return drafter
    if not reindex:
        raise CheckpointError(
            f"drafter {path}: expected the vocabulary map of the run, found another one. Its head rows belong to its own "
            "map: run `ray-eagle vocab --redo`, which takes it over, or set vocab.keep_given to false, which moves them."
        )
    check_map(d2t.numpy(), t2d.numpy(), Path("the run's map"))
    return move_rows(drafter, d2t, t2d, facts.logits.scaled(head_and_embedding(facts)[0]))


def _copy_from_target(drafter: Drafter, facts: TargetFacts) -> None:
    """Head rows (scaled as its logits are), final norm, and the last block as far as its shapes fit; its attention reads the
    hidden half alone."""
    head_VH, _, norm_H = head_and_embedding(facts)
    drafter.lm_head.weight.copy_(facts.logits.scaled(head_VH[drafter.target_ids]))
    drafter.norm.weight.copy_(norm_H)
    layer, hidden, family = drafter.midlayer, facts.hidden_size, family_of(facts.model_type)
    places: dict[str, Tensor] = {
        "input_layernorm": layer.hidden_norm.weight,
        family.mlp_norm: layer.post_attention_layernorm.weight,
        "mlp.gate_proj": layer.mlp.gate_proj.weight,
        "mlp.up_proj": layer.mlp.up_proj.weight,
        "mlp.down_proj": layer.mlp.down_proj.weight,
    }
    reading = [projection.weight for projection in layer.self_attn.projections]
    for name, weight in layer.self_attn.named_parameters(prefix="self_attn"):
        reads_input = any(weight is other for other in reading)
        places[name.removesuffix(".weight")] = weight[:, hidden:] if reads_input else weight
    for name, place in places.items():
        found = read_target_tensor(facts.path, f"layers.{facts.layers - 1}.{name}.weight")
        if found is not None and found.shape == place.shape and found.dtype in UNPACKED:
            place.copy_(found if place.dim() > 1 else family.norm_weight(found))
