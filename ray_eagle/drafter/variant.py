"""What kind of drafter a config.json describes: the format, the sizes, and the options that change the forward pass."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ray_eagle.drafter.files import fault, read_config
from ray_eagle.drafter.keys import ORIGINAL, check_keys
from ray_eagle.drafter.names import EMBEDDING
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.speculators import LAYERS, is_speculators, speculators_shape
from ray_eagle.errors import CheckpointError
from ray_eagle.target.layers import default_aux_layers
from ray_eagle.target.sizes import LatentSizes, TargetSizes, text_rope

ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")
"""SGLang's name, and the one of vLLM and TorchSpec for the same layer."""
LATENT = "Eagle3DeepseekV2ForCausalLM"
LATENTS = (LATENT, "Eagle3DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMEagle3")
"""The layer with latent attention: the name of SGLang, vLLM and TorchSpec, another one of vLLM, and SpecForge's."""
ONE_LAYER = "Only EAGLE-3 drafters with one layer, Llama's or DeepSeek's, are supported."
MARK = "ray_eagle_layer_ids"
"""Key that says what the ids of a config mean which were translated for an engine."""
OPTIONS = ("norm_before_fc", "norm_before_residual", "norm_output", "fc_norm")
THREE_IDS = "three layer ids (output of layer L, 0-based)"
REORDER = "Write the ids that it was trained on, ascending, and reorder the columns of fc to match."
Format = Literal["sglang", "speculators"]
Outputs = tuple[int, int, int]


@dataclass(frozen=True)
class Variant:
    """A drafter with one layer, by its config."""

    format: Format
    shape: DrafterShape
    """Layer ids are outputs of layers, whatever the config means by them."""
    written_ids: tuple[int, ...] | None
    """The layer ids as they stand in the config; None without a list of numbers."""
    translated_for: str | None = None
    """The engine that the written ids were translated for, where ray_eagle did so."""
    options: frozenset[str] = field(default_factory=frozenset)
    """Those of OPTIONS that are on."""
    target_hidden_size: int = 0
    """Width of each aux state; the drafter's own hidden size in nearly all."""
    own_embedding: bool = False
    """Whether its embedding was trained and is not the target's."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that it needs, by SGLang's names, those of its options included."""
        h, wide = self.shape.hidden_size, self.target_hidden_size
        expected = self.shape.tensors() | {"fc.weight": (h, 3 * wide)}
        if "fc_norm" in self.options:
            expected |= {f"fc_norm.{i}.weight": (wide,) for i in range(3)}
        if "norm_before_fc" in self.options:
            expected |= {"input_norm.weight": (3 * wide,)}
        if self.own_embedding:
            expected |= {EMBEDDING: (self.shape.vocab_size, h)}
        return expected

    def untrainable(self) -> tuple[str, object, object] | None:
        """(what, expected, found) of the first thing that `Drafter` does not compute; None for a plain EAGLE-3 layer."""
        if self.options:
            return "drafter option", "a plain EAGLE-3 layer", f"{min(self.options)} switched on"
        if self.target_hidden_size != self.shape.hidden_size:
            return "drafter layer, target_hidden_size", self.shape.hidden_size, self.target_hidden_size
        if self.own_embedding:
            return "drafter option, embed_requires_grad", False, True
        return None


def read_variant(folder: Path, layers: int | None = None, outputs: Outputs | None = None) -> Variant:
    """What config.json describes. layers: of the target, which tells what a config without layer ids means.

    outputs: the layer ids as outputs of layers, whatever the config says.

    Raises CheckpointError for a missing file or key, and for another kind of drafter.
    """
    return parse_variant(read_config(folder), folder / "config.json", layers, outputs)


def parse_variant(
    config: dict[str, Any], path: Path, layers: int | None = None, outputs: Outputs | None = None
) -> Variant:
    """As `read_variant`, from the content of a config.json that lies (or will lie) at `path`."""
    speculators = is_speculators(config)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        expected, found = "a list of one name", repr(architectures)
        raise fault("drafter config", where=f"{path}, architectures", expected=expected, found=found, fix=ORIGINAL)
    first = architectures[0] if architectures else "none"
    if not speculators and (first not in ARCHITECTURES + LATENTS or len(architectures) != 1):
        fix = ONE_LAYER
        if "Eagle" in first and "Eagle3" not in first:
            fix = "This is a drafter of EAGLE 1 or 2, which reads other states: --speculative-algorithm EAGLE, not EAGLE3."
        raise fault("drafter architecture", where=path, expected=f"{ARCHITECTURE} or {LATENT}", found=first, fix=fix)
    check_keys(config, path)
    try:
        read = speculators_shape if speculators else _shape
        shape = read(config, path, layers, outputs)
        return _variant(config, shape, speculators)
    except KeyError as error:
        expected, key, found = f"the key {error}", "", "none"
    except ValidationError as error:
        problem = error.errors()[0]
        key, expected, found = (
            str(problem["loc"][0]),
            problem["msg"].removeprefix("Input should be "),
            repr(problem["input"]),
        )
        if key == "aux_layers":
            key = f"eagle_config.{LAYERS}"
            expected = THREE_IDS
    except CheckpointError:
        raise
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        key, expected, found = "", "numbers and groups as SGLang reads them", str(error)
    where = f"{path}, {key}" if key else path
    raise fault("drafter config", where=where, expected=expected, found=found, fix=ORIGINAL)


def refuse_untrainable(variant: Variant, path: Path) -> None:
    """Raises CheckpointError for what `Drafter` does not compute: ignoring it would draft at random."""
    if problem := variant.untrainable():
        what, expected, found = problem
        what, _, key = what.partition(", ")
        fix = (
            "This variant is neither trained nor served by the reference engine, and not ignored either, since tools read "
            "it differently; `ray-eagle drafter show`, `check` and `convert` work on it."
        )
        where = f"{path}, {key}" if key else path
        raise fault(what, where=where, expected=expected, found=found, fix=fix)


def fit_faults(
    shape: DrafterShape, *, hidden_size: int, vocab_size: int, layers: int, where: object
) -> Iterator[CheckpointError]:
    """Every sign that the drafter was made for another target."""
    for name, expected, found in (
        ("hidden_size", hidden_size, shape.hidden_size),
        ("vocab_size", vocab_size, shape.vocab_size),
    ):
        if expected != found:
            fix = "Name a drafter made for this target, or none (drafter.path) to train one."
            what = f"drafter for another target: {name}"
            yield fault(what, where=where, expected=f"{expected} (the target's)", found=found, fix=fix)
    if max(shape.aux_layers) >= layers:
        yield fault(
            "drafter for another target: aux layer ids",
            where=where,
            expected=f"below {layers} (the target's layers)",
            found=list(shape.aux_layers),
            fix="Name a drafter made for this target.",
        )


def target_faults(variant: Variant, target: TargetSizes, where: object) -> Iterator[CheckpointError]:
    """As `fit_faults`, by the width of the states that it reads: it may be narrower than its target."""
    read = variant.shape.model_copy(update={"hidden_size": variant.target_hidden_size})
    yield from fit_faults(
        read, hidden_size=target.hidden_size, vocab_size=target.vocab_size, layers=target.layers, where=where
    )


def _variant(config: dict[str, Any], shape: DrafterShape, speculators: bool) -> Variant:
    eagle = config.get("eagle_config") if isinstance(config.get("eagle_config"), dict) else {}
    on = {key for key in OPTIONS if config.get(key) or (eagle or {}).get(key)}
    if config.get("use_aux_norm"):
        on.add("fc_norm")
    ids = (eagle or {}).get(LAYERS) or config.get(LAYERS)
    return Variant(
        format="speculators" if speculators else "sglang",
        shape=shape,
        written_ids=tuple(ids) if ids and _is_numbers(ids) else None,
        translated_for=_mark(config, ids).get("engine"),
        options=frozenset(on),
        target_hidden_size=int(config.get("target_hidden_size") or shape.hidden_size),
        own_embedding=bool(config.get("embed_requires_grad")),
    )


def in_order(variant: Variant) -> bool:
    """Whether engines can capture as the config's layer ids say: in layer order, once each. True without any ids in it."""
    ids = variant.shape.aux_layers
    return variant.written_ids is None or 0 <= ids[0] < ids[1] < ids[2]


def _is_numbers(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(one) is int for one in ids)


def _mark(config: dict[str, Any], ids: Any) -> dict[str, Any]:
    """What the ids mean, if they are still those that were translated (an edited config means what it says); else empty."""
    mark = config.get(MARK)
    return mark if isinstance(mark, dict) and mark.get("written") == ids else {}


def _shape(config: dict[str, Any], path: Path, layers: int | None, outputs: Outputs | None) -> DrafterShape:
    eagle = config.get("eagle_config") or {}
    ids: Any = eagle.get(LAYERS) or config.get(LAYERS)
    if outputs:
        ids = outputs
    elif ids is None and layers is not None:
        ids = default_aux_layers(layers)
    else:
        ids = _mark(config, ids).get("outputs", ids)
        if ids is not None and not _is_numbers(ids):
            where = f"{path}, eagle_config.{LAYERS}"
            word = next(one for one in ids if type(one) is not int) if isinstance(ids, list) else ids
            raise fault("drafter config", where=where, expected=THREE_IDS, found=repr(word), fix=ORIGINAL)
    if config.get("num_hidden_layers", 1) != 1:
        found = config["num_hidden_layers"]
        raise fault("drafter layer", where=f"{path}, num_hidden_layers", expected=1, found=found, fix=ONE_LAYER)
    heads = config["num_attention_heads"]
    latent = _latent(config, path) if config["architectures"][0] in LATENTS else None
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return DrafterShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=heads if latent else config.get("num_key_value_heads") or heads,
        head_dim=latent.qk_head_dim if latent else head_dim,
        vocab_size=config["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        aux_layers=ids,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_parameters=text_rope(config),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        latent=latent,
    )


def _latent(config: dict[str, Any], path: Path) -> LatentSizes:
    """Sizes of latent attention, whose rotated coordinates lie in pairs, as DeepSeek and the engines lay them."""
    if config.get("rope_interleave") is False:
        where, fix = f"{path}, rope_interleave", "Only DeepSeek's layout is supported: export the drafter in it."
        raise fault("drafter layer", where=where, expected=True, found=False, fix=fix)
    others = {name: config[name] for name in LatentSizes.model_fields if name != "q_lora_rank"}
    return LatentSizes(q_lora_rank=config.get("q_lora_rank"), **others)
