"""What the keys of a drafter's config.json may hold, told by name before anything is computed from them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_eagle.drafter.files import fault
from ray_eagle.target.sizes import LatentSizes

COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
    *LatentSizes.model_fields,
)
OPTIONAL = ("num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size", "q_lora_rank", "rope_theta")
"""May be null."""
GROUPS = ("eagle_config", "rope_parameters", "rope_scaling")
ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
PLAIN: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Keys that may have one value: the layer that is computed, here and in the engines."""
ORIGINAL = "Take the original config.json, with the layer ids that the drafter was trained on."
ONLY_PLAIN = (
    "Only a layer with silu and without biases is supported: correct the key if the weights are of such a layer."
)


def check_keys(config: dict[str, Any], path: Path, group: str = "") -> None:
    """Raises CheckpointError naming the key. group: what of the file `config` is, with a dot at its end."""
    for key, expected, value in _faults(config):
        where = f"{path}, {group}{key}"
        raise fault("drafter config", where=where, expected=expected, found=repr(value), fix=ORIGINAL)
    for key, wanted in PLAIN.items():
        if config.get(key) not in (None, wanted):
            where = f"{path}, {group}{key}"
            raise fault("drafter layer", where=where, expected=wanted, found=config[key], fix=ONLY_PLAIN)


def _faults(config: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(key, expected, found) of each value of the wrong kind: engines do not take "32" for 32, nor does what is computed here."""
    there = {key: value for key, value in config.items() if value is not None or key not in OPTIONAL}
    for key in COUNTS:
        if key in there and not (type(there[key]) is int and there[key] > 0):
            yield key, "an integer above 0", there[key]
    for key in ("rms_norm_eps", "rope_theta"):
        if key in there and not _is_number(there[key]):
            yield key, "a number", there[key]
    for name in GROUPS:
        group = config.get(name) or {}
        if not isinstance(group, dict):
            yield name, "an object", group
        elif name != "eagle_config":
            for key in ROPE_NUMBERS:
                if group.get(key) is not None and not _is_number(group[key]):
                    yield f"{name}.{key}", "a number", group[key]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
