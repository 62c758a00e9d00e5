"""Which layers the drafter listens to. Ids are always "output of layer L", 0-based."""

from ray_eagle.errors import TargetError


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """[1, n//2 - 1, n - 4]: what SGLang takes without ids. Raises TargetError when they collide (n < 7)."""
    ids = (1, layers // 2 - 1, layers - 4)
    if not 0 <= ids[0] < ids[1] < ids[2] < layers:
        raise TargetError(
            f"aux layers: a target with {layers} layers has no default ids (1, n//2 - 1, n - 4 = {list(ids)} collide below 7 "
            "layers). Set target.aux_layers to three distinct ids, each the output of that layer, 0-based."
        )
    return ids


def check_aux_layers(ids: tuple[int, int, int] | None, layers: int) -> tuple[int, int, int]:
    """The ids in use: the given ones, or the default. Raises TargetError unless distinct, ascending and in range."""
    if ids is None:
        return default_aux_layers(layers)
    if not 0 <= ids[0] < ids[1] < ids[2] < layers:
        raise TargetError(
            f"target.aux_layers: expected three distinct ids, ascending, from 0 to {layers - 1} (output of that layer), "
            f"found {list(ids)}. Engines capture in layer order whatever the order in the config."
        )
    return ids


SGLANG_BEFORE = "SGLang before 2026-05"
SGLANG_SINCE = "SGLang since 2026-05"
READ_BY_FIRST_ID = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite")


def layer_readings(ids: tuple[int, ...] | list[int], layers: int, model_type: str) -> dict[str, list[int]]:
    """What each engine takes from the ids in a drafter's config: engine -> ids as "output of layer L".

    `layers` and `model_type` are the target's. -1 is the output of the embedding.
    """
    as_output, as_input = list(ids), [k - 1 for k in ids]
    before = since = as_output
    if model_type == "gpt_oss" and max(ids) == layers:
        before = since = as_input
    elif model_type in READ_BY_FIRST_ID and ids[0] != 1:
        since = as_input
    return {
        SGLANG_BEFORE: before,
        SGLANG_SINCE: since,
        "vLLM": as_input,
        "speculators": as_input,
        "SpecForge": as_output,
        "TorchSpec": as_output,
        "ModelOpt": as_output,
        "AngelSlim": as_output,
    }
