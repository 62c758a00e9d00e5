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
