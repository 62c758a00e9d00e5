"""What inspection of a model cannot know of its family, by the `model_type` of the language model in config.json.

Where layers, embedding, final norm and head live needs no table: `parts.find_parts` looks into the loaded model, and
`tensors` finds the embedding, the norm beside it and the head by name through any prefix.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ray_eagle.errors import TargetError
from ray_eagle.target.sizes import read_config


@dataclass(frozen=True)
class Family:
    """The defaults are those of a Llama."""

    norm_offset: float = 0.0
    """Norms multiply by their stored weight plus this."""
    mlp_norm: str = "post_attention_layernorm"
    """The norm in front of a layer's MLP."""
    native: bool = False
    """Loaded with transformers' own classes although such folders ship Python code: that was written for transformers 4."""
    loaded_as: str | None = None
    """The model_type of those classes where it is another one."""

    def norm_weight(self, stored_H: Tensor) -> Tensor:
        """[H]: what a norm really multiplies by, from its tensor in the checkpoint."""
        return stored_H.float() + self.norm_offset if self.norm_offset else stored_H


LLAMA = Family()
FAMILIES = {
    "deepseek_v3": Family(native=True),
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(norm_offset=1.0, mlp_norm="pre_feedforward_layernorm"),
    "gemma3_text": Family(norm_offset=1.0, mlp_norm="pre_feedforward_layernorm"),
    "kimi_k2": Family(native=True, loaded_as="deepseek_v3"),
    "kimi_k25": Family(native=True),
}


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, LLAMA)


def read_settings(path: Path, trust_remote_code: bool) -> tuple[Any, bool]:
    """transformers' config of a model folder, and whether the folder's code may make the model."""
    from transformers import CONFIG_MAPPING, AutoConfig

    family = family_of(str(read_config(path).get("model_type")))
    trusted = trust_remote_code and not family.native
    if family.loaded_as:
        return CONFIG_MAPPING[family.loaded_as].from_pretrained(path), trusted
    return AutoConfig.from_pretrained(path, trust_remote_code=trusted), trusted


def skeleton(path: Path, trust_remote_code: bool) -> Any:
    """The whole model without memory: its class, its config, and the names of its parts.

    A causal language model, or one with towers for other senses around it. Raises OSError, ValueError and whatever else
    transformers raises for a folder that it cannot read, TargetError for a class that it does not have.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    settings, trusted = read_settings(path, trust_remote_code)
    autos = (AutoModelForCausalLM, AutoModelForImageTextToText)
    auto = next((auto for auto in autos if type(settings) in auto._model_mapping), None)
    if trusted and "AutoModelForCausalLM" in (getattr(settings, "auto_map", None) or {}):
        auto = AutoModelForCausalLM
    if auto is None:
        raise TargetError(
            f"target {path} ({settings.model_type}): expected a model_type that transformers has a causal language model for, "
            f"found none for {type(settings).__name__}. A folder with code of its own needs target.trust_remote_code true."
        )
    with torch.device("meta"):
        return auto.from_config(settings, attn_implementation="eager", trust_remote_code=trusted)
