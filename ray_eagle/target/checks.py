"""What a family must keep for its states to be right, tried on a few tokens of each loaded stage.

Whether a decoder keeps packed documents apart, runs in stages, or changes the head's output otherwise than config.json seems
to say shows in no config: some pass no positions to their masks, some scale their inputs. Better a refused target than
wrong states on disk.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ray_eagle.errors import TargetError
from ray_eagle.target.capture import Stage, TokenPack
from ray_eagle.target.loading import TargetFacts

DOCUMENT = 8
"""Tokens of each document tried."""
TRIALS = 3
HALF_DRIFT = 0.02
"""In bfloat16 and float16, the relative change of a state that rounding alone explains."""
FULL_DRIFT = 1e-4
"""In float32."""
LOUD = 100.0
"""Largest logit, before a cap, of the trial of the head."""


class PassThrough(nn.Module):
    """Stands where a layer of another stage would: hands hidden states on, and keeps the plain attributes that decoders read."""

    def __init__(self, absent: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(absent).items() if not name.startswith("_")}
        self.__dict__.update(plain)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


@torch.inference_mode()
def check_documents(stage: Stage, facts: TargetFacts) -> None:
    """States of a document must not depend on what the one before it says. Raises TargetError when they do.

    Both runs have the same shapes, so they mostly agree to the bit. Rounding may flip a mixture's near tie, hence the trials.
    """
    generator = torch.Generator().manual_seed(0)
    tolerance = FULL_DRIFT if stage.parts.decoder.dtype == torch.float32 else HALF_DRIFT
    drift = 0.0
    for _ in range(TRIALS):
        one, other = (_input(stage, facts, 2 * DOCUMENT, generator) for _ in range(2))
        other = torch.cat([other[:DOCUMENT], one[DOCUMENT:]])
        states_TH, changed_TH = (_decode(stage, x, [DOCUMENT, DOCUMENT])[DOCUMENT:].float() for x in (one, other))
        drift = ((states_TH - changed_TH).norm(dim=-1) / states_TH.norm(dim=-1)).max().item()
        if not drift > tolerance:  # NaN is another fault, found where states are read
            return
    raise TargetError(
        f"target {facts.path} ({facts.model_type}): packed samples see each other: other text before a sample changes its "
        f"states by {drift:.1%} with target.attention = {stage.parts.decoder.config._attn_implementation}. Set "
        "target.attention to sdpa, or to flash_attention_2 if it is installed; otherwise this family is not supported."
    )


@torch.inference_mode()
def check_head(model: Any, stage: Stage, facts: TargetFacts) -> None:
    """The model's logits must be `facts.logits` of its head's weight times the last state, since training computes them so.

    Tried on outputs far beyond any soft cap, which would hardly bend small ones. Raises TargetError otherwise.
    """
    head = stage.parts.head
    given = _input(stage, facts, DOCUMENT, torch.Generator().manual_seed(0))
    pack, hidden_TH = _packed(stage, given, [DOCUMENT])
    last_TH = stage.decode(pack, hidden_TH)
    gain = LOUD / (facts.logits.scale * (last_TH @ head.weight.T).abs().max().float())
    own_TV = facts.logits.apply_(((gain * last_TH).to(last_TH.dtype) @ head.weight.T).float())
    hook = head.register_forward_pre_hook(lambda _, inputs: ((gain * inputs[0]).to(inputs[0].dtype),))
    try:
        logits_TV = model(**stage.decoder_arguments(pack, hidden_TH)).logits[0].float()
    finally:
        hook.remove()
    biased = getattr(head, "bias", None) is not None  # small beside loud logits
    if biased or (logits_TV - own_TV).abs().max() > HALF_DRIFT * own_TV.abs().max():
        raise TargetError(
            f"target {facts.path} ({facts.model_type}): expected logits {facts.logits} by config.json, with x its head's weight "
            f"times the last state; found {'a bias' if biased else 'others'}. This family is not supported."
        )


@torch.inference_mode()
def check_split(stage: Stage, facts: TargetFacts) -> None:
    """Without its layers and norm a stage must hand hidden states on unchanged; some decoders scale their inputs first.

    Raises TargetError for a family that cannot be split into stages.
    """
    decoder, norm = stage.parts.decoder, stage.parts.norm
    pack = TokenPack.of([([0] * DOCUMENT, [0] * DOCUMENT)])
    hidden_TH = _random_states(facts, DOCUMENT, decoder.dtype, torch.Generator().manual_seed(0))
    reason = "its decoder changes hidden states outside its layers"
    try:
        decoder.layers, decoder.norm = nn.ModuleList(PassThrough(layer) for layer in stage.parts.layers), nn.Identity()
        same = torch.equal(stage.decode(pack, hidden_TH).cpu(), hidden_TH)
    except (AttributeError, TypeError, IndexError, RuntimeError) as error:
        same, reason = False, f"its decoder does not run without layers ({error})"
    finally:
        decoder.layers, decoder.norm = stage.parts.layers, norm
    if getattr(decoder.config, "num_kv_shared_layers", 0):
        same, reason = False, "its later layers reuse keys and values of earlier ones"
    if not same:
        raise TargetError(
            f"target {facts.path} ({facts.model_type}): this family cannot be split into stages: {reason}. "
            "Use one GPU that holds it whole."
        )


def _decode(stage: Stage, given: Tensor, lengths: list[int]) -> Tensor:
    return stage.decode(*_packed(stage, given, lengths))


def _packed(stage: Stage, given: Tensor, lengths: list[int]) -> tuple[TokenPack, Tensor | None]:
    """What `Stage.run` takes: token ids for the first stage, hidden states for the others."""
    ids = given if stage.first else torch.zeros(len(given), dtype=torch.int64)
    pack = TokenPack.of([(part.tolist(), [0] * len(part)) for part in ids.split(lengths)])
    return pack, None if stage.first else given


def _input(stage: Stage, facts: TargetFacts, tokens: int, generator: torch.Generator) -> Tensor:
    if stage.first:
        return torch.randint(facts.vocab_size, (tokens,), generator=generator)
    return _random_states(facts, tokens, stage.parts.decoder.dtype, generator)


def _random_states(facts: TargetFacts, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(tokens, facts.hidden_size, generator=generator).to(dtype)
