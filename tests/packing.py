"""Quantised copies of a tiny model's folder, as their libraries write them, and the dequantised twin of each. Slow and plain."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ray_eagle.target.tensors import SINGLE

EXPERTS = re.compile(r"(?:layers|blocks)\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight$")
PROJECTIONS = re.compile(r"(?:layers|blocks)\.\d+\..*_proj\w*\.weight$")
GROUP = 8
BLOCK = (16, 12)
"""No power of two, and not a divisor of most sizes."""


def int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = weight.shape
    scale = (weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7).bfloat16()
    values = (weight.unflatten(1, (-1, GROUP)) / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).int()
    packed = torch.zeros(rows, columns // 8, dtype=torch.int32)
    twin = torch.zeros(rows, columns, dtype=torch.bfloat16)
    for row in range(rows):
        for word in range(columns // 8):
            number = sum((int(values[row, 8 * word + i]) + 8) << (4 * i) for i in range(8))
            packed[row, word] = number - (1 << 32) if number >= 1 << 31 else number
        for column in range(columns):
            twin[row, column] = values[row, column].bfloat16() * scale[row, column // GROUP]
    shape = torch.tensor([rows, columns], dtype=torch.int32)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}, twin


def fp8_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    packed = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": packed, "weight_scale": scale}, (packed.float() * scale.float()).bfloat16()


def fp8_tensor(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = (weight.abs().amax() / 448).reshape(1)
    packed = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": packed, "weight_scale": scale}, (packed.float() * scale).bfloat16()


def int8_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    packed = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": packed, "weight_scale": scale}, (packed.float() * scale.float()).bfloat16()


def fp8_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = weight.shape
    packed, twin = weight.to(torch.float8_e4m3fn), torch.zeros(rows, columns, dtype=torch.bfloat16)
    scale = torch.zeros(math.ceil(rows / BLOCK[0]), math.ceil(columns / BLOCK[1]))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scale[i, j] = weight[place].abs().amax() / 448
            packed[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn)
            twin[place] = (packed[place].float() * scale[i, j]).bfloat16()
    return {"weight": packed, "weight_scale_inv": scale}, twin


def compressed(form: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "symmetric": True, "actorder": None, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


KINDS: dict[str, tuple[Callable[[Tensor], tuple[dict[str, Tensor], Tensor]], dict[str, Any]]] = {
    "int4": (int4, compressed("pack-quantized", 4, group_size=GROUP, strategy="group", type="int")),
    "fp8-rows": (fp8_rows, compressed("float-quantized", 8, strategy="channel", type="float")),
    "fp8-tensor": (fp8_tensor, compressed("naive-quantized", 8, strategy="tensor", type="float")),
    "int8-rows": (int8_rows, compressed("int-quantized", 8, strategy="channel", type="int")),
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
}


def quantised(plain: Path, folder: Path, kind: str, which: re.Pattern[str] = EXPERTS) -> tuple[Path, Path]:
    """The packed copy of a single-file model, and its dequantised twin (all in bfloat16)."""
    packed_folder, twin_folder = folder / "packed", folder / "twin"
    packed, twin = {}, {}
    quantise, settings = KINDS[kind]
    for name, tensor in load_file(plain / SINGLE).items():
        if which.search(name):
            parts, twin[name] = quantise(tensor.float())
            packed |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            packed[name] = twin[name] = tensor if "e_score" in name else tensor.bfloat16()
    for target, tensors in ((packed_folder, packed), (twin_folder, twin)):
        shutil.copytree(plain, target)
        save_file(tensors, target / SINGLE, metadata={"format": "pt"})
    config = json.loads((packed_folder / "config.json").read_text())
    config.get("text_config", config)["quantization_config"] = settings
    (packed_folder / "config.json").write_text(json.dumps(config))
    return packed_folder, twin_folder
