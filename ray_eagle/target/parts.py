"""Where a transformers causal language model keeps its layers, final norm, head and embedding."""

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
    """Raises TargetError for a model that does not name its parts in the usual way."""
    decoder = model.get_decoder()
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if layers is None or norm is None:
        raise TargetError(
            f"target class {type(model).__name__}: expected a decoder with `layers` and `norm`, found {type(decoder).__name__} "
            "without. This family is not supported yet."
        )
    return TargetParts(decoder, layers, norm, model.get_output_embeddings(), model.get_input_embeddings())


def drop_beside(model: nn.Module, kept: tuple[nn.Module, ...]) -> None:
    """Replace every module that neither is, holds, nor lies in a kept one by an empty one: towers for other senses."""
    for name, child in model.named_children():
        if child in kept:
            continue
        if any(module in kept for module in child.modules()):
            drop_beside(child, kept)
        else:
            setattr(model, name, nn.Identity())
