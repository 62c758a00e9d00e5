"""What engines make of a drafter with latent attention, beyond what holds for every drafter.

Read in SGLang (`kimi_k25_eagle3.py`, 2026-05 to 08) and vLLM (`deepseek_eagle3.py`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_eagle.drafter.engines import Engine
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.variant import LATENT, LATENTS
from ray_eagle.preflight.report import Finding, Level

TAKEN_FOR_PREDICTION = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
"""Values of `model_type` that vLLM takes for the multi-token prediction of such a target."""
CONVERT = "ray-eagle drafter convert SRC DST --to sglang writes what engines read."
FROM_ORIGINAL = "Write the rope_scaling that it was trained with, with the keys of DeepSeek's configs."


def latent_findings(
    shape: DrafterShape, config: dict[str, Any], where: Path, engine: Engine | None
) -> Iterator[Finding]:
    """config: the whole config.json, which lies at `where`."""
    assert shape.latent is not None
    rope = shape.rope_parameters
    kind = rope.get("rope_type")
    if kind not in ("default", "yarn"):
        message = f"{where}: RoPE {kind}: SGLang and vLLM take every scaled RoPE of latent attention for YaRN."
        yield _tell("error", "RoPE", message, "Train a drafter with the default RoPE, or with YaRN.")
    elif kind == "yarn" and not rope.get("original_max_position_embeddings"):
        message = f"{where}: RoPE yarn needs original_max_position_embeddings, which the config does not say."
        yield _tell("error", "RoPE", message, FROM_ORIGINAL)
    elif kind == "yarn" and (("mscale" in rope) != ("mscale_all_dim" in rope) or rope.get("attention_factor")):
        message = f"{where}: RoPE yarn: expected both mscale and mscale_all_dim, or neither, and no attention_factor: "
        yield _tell("warning", "RoPE", message + "engines and transformers scale it differently.", FROM_ORIGINAL)
    name = config["architectures"][0]
    if engine is None or engine.kind == "reference":
        return
    if not engine.reads_latent():
        message = f"{engine.name} has no drafter with latent attention ({name})."
        yield _tell("error", "engine", message, "Serve with SGLang 0.5.13 or later, or with vLLM.")
    elif name not in (LATENTS[:1] if engine.kind == "sglang" else LATENTS[:2]):
        yield _tell("error", "engine", f"{where}: {engine.name} does not know {name}; it is {LATENT} there.", CONVERT)
    if engine.kind == "sglang" and shape.latent.q_lora_rank is None:
        message = f"{where}: no q_lora_rank: SGLang refuses a drafter whose queries have no rank."
        yield _tell("error", "engine", message, "Serve with vLLM, or train one with drafter.q_lora_rank.")
    if engine.kind == "vllm" and config.get("model_type") in TAKEN_FOR_PREDICTION:
        message = (
            f"{where}: model_type {config['model_type']}: vLLM takes it for the target's own multi-token prediction."
        )
        yield _tell("error", "engine", message, CONVERT)


def _tell(level: Level, check: str, message: str, fix: str) -> Finding:
    return Finding(level=level, check=check, message=message, fix=fix)
