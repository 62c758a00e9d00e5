"""What a drafter folder is, from its config and headers alone: also one that ray_eagle can neither train nor check."""

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_eagle.drafter.contents import read_contents
from ray_eagle.drafter.files import StoredTensor, read_config, read_headers
from ray_eagle.drafter.names import EMBEDDING, naming_of
from ray_eagle.drafter.speculators import is_speculators
from ray_eagle.drafter.variant import Variant, parse_variant, refuse_untrainable
from ray_eagle.errors import EagleError
from ray_eagle.target.layers import SGLANG_SINCE, layer_readings

FAMILIES = {
    "LlamaForCausalLMEagle3": "EAGLE-3, one Llama layer",
    "Eagle3LlamaForCausalLM": "EAGLE-3, one Llama layer",
    "Eagle3DeepseekV2ForCausalLM": "EAGLE-3, one DeepSeek layer (latent attention)",
    "Eagle3DeepseekV3ForCausalLM": "EAGLE-3, one DeepSeek layer (latent attention)",
    "DeepseekV3ForCausalLMEagle3": "EAGLE-3, one DeepSeek layer (latent attention)",
    "LlamaForCausalLMEagle": "EAGLE 1 or 2",
}
ANY_DEPTH = 1 << 20
"""Layers of a target that is not known."""
UNKNOWN = (-1, -1, -1)
"""Layer ids of a config that says none."""


@dataclass(frozen=True)
class Description:
    """A drafter folder."""

    folder: Path
    format: str
    family: str
    variant: Variant | None
    """None where the config does not describe an EAGLE-3 drafter of one layer; `problem` says why."""
    problem: str
    """Why it cannot be trained or read; empty for a plain EAGLE-3 drafter."""
    tensors: dict[str, StoredTensor]
    """By the names in the files."""
    naming: str
    embedding: bool
    maps: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Elements of all floating-point tensors."""
        return sum(math.prod(t.shape) for t in self.tensors.values() if t.dtype.startswith(("F", "BF")))

    @property
    def outputs(self) -> tuple[int, ...] | None:
        """Layer ids as outputs of layers; None where the config does not say."""
        return self.variant.shape.aux_layers if self.variant and self.variant.shape.aux_layers != UNKNOWN else None

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())


def describe(folder: Path) -> Description:
    """Raises CheckpointError when there is no config or the weights are missing or damaged."""
    config = read_config(folder)
    headers = read_headers(folder)
    speculators = is_speculators(config)
    variant, problem = None, ""
    try:
        variant = parse_variant(config, folder / "config.json")
        refuse_untrainable(variant, folder / "config.json")
        read_contents(folder, variant)
    except EagleError as error:
        problem = str(error)
    if variant is None:  # what it is can be told without layer ids
        with suppress(EagleError):
            variant = parse_variant(config, folder / "config.json", outputs=UNKNOWN)
    naming = naming_of(headers, speculators=speculators)
    bare = {naming.here(name) for name in headers}
    return Description(
        folder=folder,
        format="speculators" if speculators else "sglang",
        family=_family(config, speculators),
        variant=variant,
        problem=problem,
        tensors=headers,
        naming=f"{'model.' if naming.prefix else ''}{naming.layer}*",
        embedding=EMBEDDING in bare,
        maps=tuple(sorted({"d2t", "t2d"} & bare)),
    )


def to_json(shown: Description) -> dict[str, Any]:
    """Everything as JSON values."""
    variant = shown.variant
    return {
        "folder": str(shown.folder),
        "format": shown.format,
        "family": shown.family,
        "problem": shown.problem,
        "parameters": shown.parameters,
        "bytes": shown.bytes,
        "naming": shown.naming,
        "embedding": shown.embedding,
        "maps": list(shown.maps),
        "options": sorted(variant.options) if variant else [],
        "written_layer_ids": list(variant.written_ids or ()) if variant else [],
        "translated_for": variant.translated_for if variant else None,
        "shape": variant.shape.model_dump(mode="json") | {"aux_layers": shown.outputs} if variant else None,
        "tensors": {
            name: {"dtype": t.dtype, "shape": list(t.shape), "bytes": t.bytes} for name, t in shown.tensors.items()
        },
    }


def readings(shown: Description) -> list[tuple[str, list[int]]]:
    """Who reads the written layer ids how: (engines or tools, outputs of layers)."""
    if not shown.variant or not shown.variant.written_ids:
        return []
    ids = list(shown.variant.written_ids)
    plain, latent = layer_readings(ids, ANY_DEPTH, "llama"), layer_readings(ids, ANY_DEPTH, "deepseek_v3")
    if shown.format == "speculators":
        return [("vLLM, speculators", plain["vLLM"])]
    return [
        ("SpecForge, TorchSpec, ModelOpt, AngelSlim", plain["SpecForge"]),
        ("SGLang, most targets", plain[SGLANG_SINCE]),
        (f"{SGLANG_SINCE}, DeepSeek, Kimi, GLM-4-MoE-Lite", latent[SGLANG_SINCE]),
        ("vLLM, speculators", plain["vLLM"]),
    ]


def _family(config: dict[str, Any], speculators: bool) -> str:
    if speculators:
        return f"speculators {config.get('speculators_model_type')} {config.get('speculators_version', '')}".rstrip()
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "no architecture"
    return f"{FAMILIES.get(name, 'unknown')} ({name})"
