"""Quantised targets: weights stay packed in memory, and are unpacked where they are multiplied.

How they are packed is read from `quantization_config` (see `packing_of`), which of them from the checkpoint's names. Activations
are never quantised: states are those of the dequantised model. Experts are unpacked a few at a time and multiplied one by
one, so that a layer whose experts are 34 GB in bfloat16 (Kimi-K2.5) needs a fraction of its packed size beside it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ray_eagle.errors import TargetError, explain
from ray_eagle.target.tensors import LAYER, OTHER_TOWERS, open_tensors
from ray_eagle.target.unpacking import unpack_int4, unpack_scaled

UNPACKED_BYTES = 2**29
"""Unpacked weights at one time; where it goes step by step, unpacking needs three times as much for a moment: 2 GiB in all."""
EXPERT = re.compile(r"^(?P<experts>.*)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)$")
SCALED = ("float-quantized", "int-quantized", "naive-quantized")
DEFAULT_GATE = "_default_apply_gate"
"""What transformers calls act(gate) * up."""
FIX = "Give a checkpoint in one of these formats, or dequantise it (in bfloat16) once."


@dataclass(frozen=True)
class Packing:
    """How one packed weight lies in a checkpoint, as two tensors beside each other, and what it stands for."""

    weight: str
    """Name of the packed tensor under its module's, and of its scales."""
    scale: str
    unpack: Callable[[Tensor, Tensor], Tensor]
    """The packed tensor [..., O, P] and its scales -> [..., O, C] in the scales' precision, bfloat16 at least."""


def packing_of(config: dict[str, Any], where: Path) -> Packing | None:
    """From config.json. None for a model that is not quantised, or in a way that is left to transformers.

    Raises TargetError for a format of compressed-tensors that is none of ours.
    """
    quantisation = config.get("quantization_config") or {}
    method, kind = quantisation.get("quant_method"), quantisation.get("format")
    if method == "fp8":
        return Packing("weight", "weight_scale_inv", _scaled(quantisation.get("weight_block_size")))
    if method != "compressed-tensors":
        return None
    groups = [group.get("weights") or {} for group in (quantisation.get("config_groups") or {}).values()]
    found = {
        (w.get("num_bits"), w.get("symmetric", True), w.get("actorder"), str(w.get("block_structure"))) for w in groups
    }
    if len(found) == 1:
        [(bits, symmetric, order, _)] = found
        if kind == "pack-quantized" and (bits, symmetric, order) == (4, True, None):
            return Packing("weight_packed", "weight_scale", unpack_int4)
        if kind in SCALED and (bits, symmetric) == (8, True):
            return Packing("weight", "weight_scale", _scaled(groups[0].get("block_structure")))
    raise TargetError(
        explain(
            "target quantisation",
            where=f"{where / 'config.json'}, quantization_config",
            expected=f"compressed-tensors pack-quantized in 4 bits or {', '.join(SCALED)} in 8, symmetric, in order, all alike",
            found=f"{kind}: "
            + "; ".join(
                f"{bits} bits{'' if symmetric else ', asymmetric'}{f', actorder {order}' if order else ''}"
                for bits, symmetric, order, _ in sorted(found, key=str)
            ),
            fix=FIX,
        )
    )


def _scaled(block: list[int] | None) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(unpack_scaled, block=(block[0], block[1])) if block else unpack_scaled


Take = Callable[[str, int, int], tuple[Tensor, Tensor]]
"""Reads the packed weight and the scales of a module by its name, under the one that is filled, its rows and columns."""


class PackedLinear(nn.Module):
    """Stands where an nn.Linear did."""

    packed: Tensor
    scale: Tensor

    def __init__(self, replaced: nn.Linear, packing: Packing) -> None:
        super().__init__()
        self.packing, self.bias = packing, replaced.bias
        self.in_features, self.out_features = replaced.in_features, replaced.out_features

    def forward(self, x: Tensor) -> Tensor:
        weight_OC = self.packing.unpack(self.packed, self.scale)
        return linear(x, weight_OC.to(x.dtype), self.bias)

    def fill(self, take: Take) -> None:
        self.packed, self.scale = take("", self.out_features, self.in_features)


class PackedExperts(nn.Module):
    """Stands where transformers keeps all routed experts of a layer as two tensors: gate over up, and down."""

    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]

    def __init__(self, replaced: Any, packing: Packing) -> None:
        super().__init__()
        self.packing, self.act_fn, self.num_experts = packing, replaced.act_fn, replaced.num_experts
        self.hidden_size, self.inner_size = replaced.down_proj.shape[-2:]

    def forward(self, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, H]: the weighted sum of the chosen experts' outputs. Waits for the device once, to learn who was chosen."""
        order_P = chosen_TK.flatten().argsort(stable=True)
        counts = torch.bincount(chosen_TK.flatten(), minlength=self.num_experts).tolist()
        ends = list(accumulate(counts))
        given_PH = hidden_TH[order_P // chosen_TK.shape[1]]
        said_PH = torch.empty_like(given_PH)
        busy = [expert for expert, count in enumerate(counts) if count]
        at_once = max(1, UNPACKED_BYTES // (2 * 3 * self.inner_size * self.hidden_size))
        for first in range(0, len(busy), at_once):
            some = busy[first : first + at_once]
            gate_up, down = (self._unpacked(pair, some, hidden_TH.dtype) for pair in (self.gate_up, self.down))
            for expert, gate_up_2IH, down_HI in zip(some, gate_up, down, strict=True):
                rows = slice(ends[expert] - counts[expert], ends[expert])
                gate, up = linear(given_PH[rows], gate_up_2IH).chunk(2, dim=-1)
                said_PH[rows] = linear(self.act_fn(gate) * up, down_HI)
        weighted_PH = said_PH * weights_TK.flatten()[order_P, None]
        back_PH = torch.empty_like(weighted_PH)
        back_PH[order_P] = weighted_PH
        return back_PH.unflatten(0, chosen_TK.shape).sum(1).to(hidden_TH.dtype)

    def _unpacked(self, pair: tuple[Tensor, Tensor], experts: list[int], dtype: torch.dtype) -> Tensor:
        first, end = experts[0], experts[-1] + 1
        if end - first == len(experts):  # as in any large pack
            packed, scale = (tensor[first:end] for tensor in pair)
        else:
            packed, scale = (torch.stack([tensor[expert] for expert in experts]) for tensor in pair)
        return self.packing.unpack(packed, scale).to(dtype)

    def fill(self, take: Take) -> None:
        """Every expert must be there. Beside what is kept, one expert's tensors are in memory."""
        held: list[Tensor] = []
        for expert in range(self.num_experts):
            gate, up = (
                take(f"{expert}.{part}", self.inner_size, self.hidden_size) for part in ("gate_proj", "up_proj")
            )
            down = take(f"{expert}.down_proj", self.hidden_size, self.inner_size)
            tensors = [*(torch.cat(both) for both in zip(gate, up, strict=True)), *down]
            held = held or [tensor.new_empty(self.num_experts, *tensor.shape) for tensor in tensors]
            for whole, tensor in zip(held, tensors, strict=True):
                whole[expert] = tensor
        self.gate_up, self.down = (held[0], held[1]), (held[2], held[3])


@dataclass(frozen=True)
class PackedWeights:
    """The packed modules of a checkpoint's decoder layers."""

    packing: Packing
    files: dict[str, Path]
    modules: dict[int, dict[str, str]]
    """Layer -> {path of a module in its layer: the module's name in the checkpoint}."""

    @staticmethod
    def of(config: dict[str, Any], folder: Path, files: dict[str, Path]) -> "PackedWeights | None":
        """From config.json (the text model's) and the names of all tensors; None where nothing is packed in a way of ours.

        Raises TargetError for an unknown format, and where a tensor outside the decoder layers is packed.
        """
        packing = packing_of(config, folder)
        if packing is None:
            return None
        modules: dict[int, dict[str, str]] = {}
        for name in files:
            module, _, last = name.rpartition(".")
            if last != packing.scale or OTHER_TOWERS.search(name):
                continue
            layer = LAYER.search(name)
            if layer is None:
                raise TargetError(
                    explain(
                        "target weights",
                        where=f"{folder}, {module}",
                        expected="an embedding and a head in floating point",
                        found=f"{name}: it is quantised",
                        fix="A quantised head cannot teach. " + FIX,
                    )
                )
            modules.setdefault(int(layer[1]), {})[module[layer.end() :]] = module
        return PackedWeights(packing, files, modules)

    def holds(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to a packed module; its bias does not."""
        layer, (module, _, last) = LAYER.search(name), name.rpartition(".")
        if layer is None or last == "bias":
            return False
        return module[layer.end() :] in self.modules.get(int(layer[1]), {})

    def replace(self, layers: nn.ModuleList, here: range) -> None:
        """Put packed modules without weights in the place of those of the layers `here`. Raises TargetError for one without."""
        for number in here:
            for path in self.modules.get(number, {}):
                place, make = path, PackedLinear
                if (expert := EXPERT.match(path)) and not _is(layers[number], path, nn.Linear):
                    place, make = expert["experts"], PackedExperts
                if _is(layers[number], place, make):
                    continue
                if not _is(layers[number], place, nn.Linear if make is PackedLinear else nn.Module):
                    raise self._cannot(number, path, "the model has no such module")
                replaced: Any = layers[number].get_submodule(place)
                if make is PackedExperts and not _plain_experts(replaced):
                    raise self._cannot(
                        number, path, f"{type(replaced).__name__} has biases, or another order of its weights"
                    )
                layers[number].set_submodule(place, make(replaced, self.packing))

    def fill(self, layers: nn.ModuleList, here: range, device: torch.device) -> None:
        """Read the weights of the layers `here` onto the device. Raises TargetError naming what is missing or misshapen."""
        names = [
            f"{module}.{part}"
            for number in here
            for module in self.modules.get(number, {}).values()
            for part in (self.packing.weight, self.packing.scale)
        ]
        if lost := [name for name in names if name not in self.files]:
            raise self._damaged(lost[0], "a packed weight beside its scales", "none")
        tensors = open_tensors(self.files, names)
        for number in here:
            for path, module in layers[number].named_modules():
                if isinstance(module, PackedLinear | PackedExperts):
                    module.fill(partial(self._take, tensors, self.modules[number], path, device))

    def _take(
        self, tensors: dict[str, Any], modules: dict[str, str], path: str, device: torch.device,
        below: str, rows: int, columns: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        place = f"{path}.{below}".strip(".")
        if place not in modules:
            raise self._damaged(place, "a packed weight, as other experts of its layer have", "none")
        name = f"{modules[place]}.{self.packing.weight}"
        packed: Tensor = tensors[name][...]
        scale: Tensor = tensors[f"{modules[place]}.{self.packing.scale}"][...]
        if scale.numel() == 1:  # one for the whole tensor
            scale = scale.reshape(1, 1).expand(rows, 1)
        elif scale.dim() == 1:
            scale = scale[:, None]
        held = (
            (packed.shape[0], packed.shape[1] * (8 if packed.dtype == torch.int32 else 1)) if packed.dim() == 2 else ()
        )
        if held != (rows, columns):
            raise self._damaged(name, f"[{rows}, {columns}] by config.json", f"{list(held)}, unpacked")
        return packed.to(device), scale.to(device)

    def _cannot(self, layer: int, path: str, why: str) -> TargetError:
        return TargetError(
            explain(
                "target quantisation",
                where=f"layer {layer}, {path}",
                expected="a linear layer, or routed experts of gate, up and down projections",
                found=why,
                fix=FIX,
            )
        )

    def _damaged(self, name: str, expected: str, found: str) -> TargetError:
        fix = "The checkpoint is incomplete or belongs to another config: copy it again."
        return TargetError(explain("target weights", where=name, expected=expected, found=found, fix=fix))


def _is(layer: nn.Module, path: str, kind: type[nn.Module]) -> bool:
    try:
        return isinstance(layer.get_submodule(path), kind)
    except AttributeError:
        return False


def _plain_experts(experts: Any) -> bool:
    """Whether they compute what `PackedExperts` does."""
    return (
        hasattr(experts, "gate_up_proj")
        and hasattr(experts, "down_proj")
        and getattr(experts, "has_gate", True)
        and getattr(experts, "is_concatenated", True)
        and not any(getattr(experts, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm"))
        and getattr(getattr(experts, "_apply_gate", None), "__name__", DEFAULT_GATE) == DEFAULT_GATE
    )
