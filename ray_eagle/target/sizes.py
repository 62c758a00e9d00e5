"""What of a target a drafter has to fit, from config.json alone: milliseconds, whatever the target's size."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ray_eagle.errors import TargetError
from ray_eagle.target.layers import READ_BY_FIRST_ID

LATENT = READ_BY_FIRST_ID
"""Families with latent attention (MLA), where the config does not say so itself."""
SIZES = (
    "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
)  # fmt: skip
"""What a nested config must say itself to be taken as it is,"""
FITS = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "rope_theta")
"""and what it must say where no more is asked: whether a drafter fits."""
FULL = "full_attention"
Size = Annotated[int, Field(gt=0)]


class LatentSizes(BaseModel):
    """Sizes of latent attention (MLA; DeepSeek-V2, 2024), by the names of DeepSeek's and Kimi's configs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    q_lora_rank: Size | None
    """Rank of the queries; None where one matrix makes them."""
    kv_lora_rank: Size
    """Rank of keys and values together."""
    qk_nope_head_dim: Size
    """Width of a query and key that RoPE leaves alone,"""
    qk_rope_head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    """and the part that it turns, which all keys of a position share."""
    v_head_dim: Size
    """Width of a value, at most that of a key."""

    @field_validator("v_head_dim")
    @classmethod
    def _narrow(cls, width: int, others: ValidationInfo) -> int:
        most = others.data.get("qk_nope_head_dim", 0) + others.data.get("qk_rope_head_dim", 0)
        if most and width > most:
            raise ValueError(f"at most {most}, the width of a key")
        return width

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class TargetSizes:
    """What of a target a drafter has to fit."""

    path: Path
    model_type: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rope: dict[str, Any]
    latent_attention: bool = False
    quantised: bool = False
    architectures: tuple[str, ...] = ()


def read_target(folder: Path) -> TargetSizes:
    """From config.json alone, nested ones (Kimi's) too. Raises TargetError when it lacks a key."""
    text = read_text_config(folder, FITS)
    try:
        return TargetSizes(
            path=folder,
            model_type=text.get("model_type", "unknown"),
            layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            max_position_embeddings=text.get("max_position_embeddings", 2048),
            rope=text_rope(text),
            latent_attention=bool(text.get("kv_lora_rank")) or text.get("model_type") in LATENT,
            quantised=bool(text.get("quantization_config")),
            architectures=tuple(text.get("architectures") or ()),
        )
    except KeyError as error:
        where = folder / "config.json"
        raise TargetError(
            f"target config: {where}: expected the key {error}, found none. Use a causal language model."
        ) from None


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises TargetError when it is damaged."""
    try:
        raw: dict[str, Any] = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise TargetError(f"{path / 'config.json'} is not valid JSON ({error}). Copy the file again.") from None
    return raw


def read_text_config(path: Path, needed: Collection[str] = SIZES) -> dict[str, Any]:
    """config.json of a model folder, with the language model's own settings on top where several models are one.

    `needed`: the settings that the caller cannot do without. Where one is not written, transformers' defaults are beneath.
    """
    raw = read_config(path)
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    written = text.keys() | ({"rope_theta"} if "rope_parameters" in text else set())
    return {**({} if written >= set(needed) else _defaults(text)), **raw, **text}


def _defaults(text: dict[str, Any]) -> dict[str, Any]:
    """The nested settings as transformers completes them: what equals its defaults is often not written (Gemma 3)."""
    from transformers import CONFIG_MAPPING  # seconds, with torch: most targets say everything themselves

    kind = text.get("model_type")
    try:
        return CONFIG_MAPPING[kind](**text).to_dict() if kind in CONFIG_MAPPING else {}
    except (TypeError, ValueError):
        return {}


def latent_sizes(text: dict[str, Any]) -> LatentSizes | None:
    """Of a target's config; None unless it states all of them, as families with another latent attention do not."""
    try:
        return LatentSizes.model_validate({name: text.get(name) for name in LatentSizes.model_fields})
    except ValidationError:
        return None


def text_rope(text: dict[str, Any]) -> dict[str, Any]:
    """RoPE of a config as transformers 5 has it, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    That of the layers that see everything, where those with a sliding window have another one.
    """
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if isinstance(rope.get(FULL), dict):
        rope = dict(rope[FULL])
    rope.setdefault("rope_theta", text.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    return rope
