"""Drafter folders as the tools write them, tiny or as sparse files of true size."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ray_eagle.drafter.checkpoint import save_drafter
from ray_eagle.drafter.files import WEIGHTS
from ray_eagle.drafter.sglang import sglang_config
from ray_eagle.drafter.shape import DrafterShape
from tests.tiny import tiny_drafter, tiny_shape

AQ_MEDAI = DrafterShape(
    hidden_size=7168,
    intermediate_size=18432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    vocab_size=163_840,
    draft_vocab_size=32_000,
    aux_layers=(2, 30, 58),
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    max_position_embeddings=262_144,
)
"""The public drafter of Kimi-K2."""
Damage = Callable[[Path], object]


def edit(**values: Any) -> Damage:
    """Set keys of config.json (nested ones as `a__b`); None removes."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for key, value in values.items():
            *path, last = key.split("__")
            place = config
            for part in path:
                place = place[part]
            if value is None:
                place.pop(last, None)
            else:
                place[last] = value
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def retensor(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def rename(name: Callable[[str], str]) -> Damage:
    return retensor(lambda t: [t.update({name(key): t.pop(key)}) for key in list(t)])


def tiny_folder(folder: Path, *changes: Damage, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> Path:
    """Our export of a random drafter, changed."""
    fields = {key: shape.pop(key) for key in ("rope_parameters", "max_position_embeddings") if key in shape}
    save_drafter(tiny_drafter(tiny_shape(**shape).model_copy(update=fields), seed=2), folder, dtype)
    for change in changes:
        change(folder)
    return folder


def sparse_drafter(folder: Path, shape: DrafterShape) -> Path:
    """A folder of true size whose weights are a hole: header and map are real (offsets 0: the first D tokens)."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(sglang_config(shape, "bfloat16")))
    header: dict[str, Any] = {}
    end = 0
    for name, size in shape.tensors().items():
        dtype, width = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}.get(name, ("BF16", 2))
        offsets = [end, end := end + width * math.prod(size)]
        header[name] = {"dtype": dtype, "shape": list(size), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.seek(start + header["t2d"]["data_offsets"][0])
        file.write(b"\1" * shape.draft_vocab_size)
        file.truncate(start + end)
    return folder


def kimi_config(folder: Path, **text: Any) -> Path:
    """A target folder with config.json alone: Kimi-K2.5's, nested."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = {
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163_840,
        "max_position_embeddings": 262_144,
        "num_attention_heads": 64,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "rope_theta": 50_000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": inner | text,
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def llama_config(folder: Path, **values: Any) -> Path:
    """A target folder with config.json alone, which `tiny_shape` fits."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 32,
        "vocab_size": 261,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder
