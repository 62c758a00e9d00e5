"""Do all keys of a drafter's config tell the same rotary position embedding, and does it lack nothing?

transformers 5 moved `rope_theta` into `rope_parameters`: a drafter whose base one side misses is read with 10000 instead,
and accepts less without any error (2.37 in place of 2.56).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.preflight.report import Finding, Level

NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kind -> keys that it cannot do without."""
ASSUMED_THETA = 10000.0
SAY_TWICE = "Write both `rope_parameters` and `rope_theta` with `rope_scaling`: ray-eagle drafter convert does."


def rope_findings(
    shape: DrafterShape, layer: dict[str, Any], where: Path, target: dict[str, Any] | None, *, nested: bool
) -> Iterator[Finding]:
    """layer: the config's settings of the Llama layer. target: RoPE of the target, if known. nested: speculators' format."""
    new, theta, old = layer.get("rope_parameters"), layer.get("rope_theta"), layer.get("rope_scaling")
    kind = str(shape.rope_parameters.get("rope_type"))
    if kind not in NEEDED:
        known = ", ".join(NEEDED)
        yield _tell("error", f"{where}: rope_type {kind}: expected one of {known}.", "Correct rope_parameters.")
        return
    if missing := [key for key in NEEDED[kind] if key not in shape.rope_parameters]:
        message = f"{where}: RoPE {kind} needs {', '.join(missing)}, which the config does not say."
        yield _tell("error", message, "Take them from the original config.json.")
    if isinstance(new, dict):
        inner = new.get("rope_theta", theta)
        if theta is not None and inner != theta:
            message = f"{where}: rope_theta is {theta}, but {inner} in rope_parameters: engines read one or the other."
            yield _tell("error", message, "Find out which one it was trained with, and write it in both places.")
        if isinstance(old, dict) and _kind(old) != kind:
            message = f"{where}: rope_scaling says {_kind(old)}, rope_parameters {kind}: engines read one or the other."
            yield _tell("error", message, "Find out which one it was trained with, and write it in both places.")
        elif not nested and ((theta is None and inner not in (None, ASSUMED_THETA)) or (kind != "default" and not old)):
            message = (
                f"{where}: RoPE ({rope_words(shape.rope_parameters)}) stands in rope_parameters alone: an engine with "
                f"transformers 4 takes the default, theta {ASSUMED_THETA:g}."
            )
            yield _tell("warning", message, SAY_TWICE)
    elif theta is None and target and target.get("rope_theta") != ASSUMED_THETA:
        message = (
            f"{where}: no RoPE base: engines take {ASSUMED_THETA:g}, where the target has {target.get('rope_theta')}."
        )
        yield _tell("warning", message, "Write the rope_theta that it was trained with.")


def rope_words(rope: dict[str, Any]) -> str:
    """`yarn, theta 50000.0`."""
    return f"{rope.get('rope_type', 'default')}, theta {rope.get('rope_theta')}"


def _kind(scaling: dict[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _tell(level: Level, message: str, fix: str) -> Finding:
    return Finding(level=level, check="RoPE", message=message, fix=fix)
