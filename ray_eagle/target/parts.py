"""Where a transformers causal language model keeps its layers, final norm, head and embedding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ray_eagle.errors import TargetError


@dataclass(frozen=True)
class TargetParts:
    decoder: nn.Module
    """The body: embeddings, layers and final norm, called with `input_ids` and `position_ids`."""
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    embedding: nn.Module


def find_parts(model: Any) -> TargetParts:
    """Raises TargetError, naming what was looked for, for a model that does not name its parts in the usual way."""
    decoder = model.get_decoder()
    found = {
        "layers": getattr(decoder, "layers", None),
        "norm": getattr(decoder, "norm", None),
        "an output embedding (the head)": model.get_output_embeddings(),
        "an input embedding": model.get_input_embeddings(),
    }
    if missing := [name for name, part in found.items() if part is None]:
        raise TargetError(
            f"target class {type(model).__name__}: expected a decoder with `layers` and `norm`, a head and an embedding, found "
            f"{type(decoder).__name__} without {', '.join(missing)}. This family is not supported."
        )
    return TargetParts(decoder, *found.values())


def drop_beside(model: nn.Module, kept: tuple[nn.Module, ...]) -> None:
    """Replace every module that neither is, holds, nor lies in a kept one by an empty one: towers for other senses."""
    for name, child in model.named_children():
        if child in kept:
            continue
        if any(module in kept for module in child.modules()):
            drop_beside(child, kept)
        else:
            setattr(model, name, nn.Identity())


def built(model_class: Any, drop: Callable[[Any], None]) -> Any:
    """The class with `drop` called on each new model, before transformers gives it weights: what is dropped is never read."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        drop(self)

    own = {"__init__": construct, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), own)


def drop_towers(model: Any) -> None:
    """Leave the language model alone."""
    parts = find_parts(model)
    drop_beside(model, (parts.decoder, parts.head))
