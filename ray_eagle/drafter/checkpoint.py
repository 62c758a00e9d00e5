"""The drafter folder that SGLang loads: write it, read it, and check every key and shape from the headers. Folders of
speculators are read as well.

SGLang skips unknown tensor names and never notices missing ones (no lm_head: a random head, acceptance 1.00), so the key
set and every shape are checked here, on writing and on reading, without touching the tensors.
"""

import json
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.speculators import UNUSED, is_speculators, speculators_shape, to_speculators
from ray_eagle.errors import CheckpointError, explain

WEIGHTS = "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
SAFETENSORS_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1}
EMBEDDING = "embed_tokens.weight"
MAPS = frozenset({"d2t", "t2d"})
UNSUPPORTED = ("norm_before_fc", "norm_before_residual", "norm_output", "fc_norm")
FLOAT_DTYPES = ("F32", "F16", "BF16")
COPY_AGAIN = "Copy the file again and compare its size with the source."


def sglang_config(shape: DrafterShape, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the folder, RoPE in the new and the old keys, layer ids nested for SGLang and on top for vLLM."""
    rope = dict(shape.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
            "use_aux_hidden_state": True,
        },
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
    }


def save_drafter(drafter: Drafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the SGLang folder and check it as a reader would. Weights in `dtype`, d2t int64 offsets, t2d bool."""
    check_map(drafter.d2t.cpu(), drafter.t2d.cpu(), folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.detach().to("cpu", dtype) if tensor.is_floating_point() else tensor.detach().cpu()).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    temporary = folder / f".{WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(sglang_config(drafter.shape, dtype), indent=2) + "\n")
    check_drafter(folder)


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter of an SGLang or speculators folder, weights in `dtype` on the CPU.

    Raises CheckpointError as `check_drafter`.
    """
    shape = check_drafter(folder)
    drafter = Drafter(shape)
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:  # sizes and offsets of the header contradict each other
        raise CheckpointError(
            f"{folder / WEIGHTS}: the safetensors header is damaged ({error}). {COPY_AGAIN}"
        ) from None
    # without maps (speculators, a drafter of the whole vocabulary) each draft token is the target's of the same id
    whole = {"d2t": drafter.d2t, "t2d": torch.ones_like(drafter.t2d)}
    names = _names(_read_config(folder), shape, tensors.keys())
    drafter.load_state_dict({name: tensors[names[name]] if name in names else whole[name] for name in shape.tensors()})
    check_map(drafter.d2t, drafter.t2d, folder)
    return drafter.to(dtype)


def _read_config(folder: Path) -> Any:
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(
            explain("no drafter", where=folder, expected="a folder", found="nothing", fix="Check drafter.path.")
        )
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            explain(
                "drafter file missing",
                where=path,
                expected="config.json",
                found="nothing",
                fix="Copy the whole folder.",
            )
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}). Copy the file again.") from None


def read_shape(folder: Path) -> DrafterShape:
    """The shape that config.json states, as SGLang or speculators writes it.

    Raises CheckpointError for a missing file or key, and for another kind of drafter.
    """
    path, config = folder / "config.json", _read_config(folder)
    speculators = is_speculators(config)
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not speculators and architectures != [ARCHITECTURE]:
        raise CheckpointError(
            explain(
                "drafter architecture",
                where=path,
                expected=ARCHITECTURE,
                found=architectures[0] if isinstance(architectures, list) and architectures else "none",
                fix="Only EAGLE-3 drafters with one Llama layer are supported.",
            )
        )
    _refuse_variants(config, path)
    try:
        return speculators_shape(config, path) if speculators else _shape(config)
    except KeyError as error:
        expected, key, found = f"the key {error}", "", "none"
    except ValidationError as error:
        fault = error.errors()[0]
        key, expected, found = str(fault["loc"][0]), fault["msg"], repr(fault["input"])
        if key == "aux_layers":
            key = "eagle_config.eagle_aux_hidden_state_layer_ids"
            expected = "three layer ids (output of layer L, 0-based)"
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        key, expected, found = "", "numbers and groups as SGLang reads them", str(error)
    where = f"{path}, {key}" if key else path
    fix = "Take the original config.json, with the layer ids that the drafter was trained on."
    raise CheckpointError(explain("drafter config", where=where, expected=expected, found=found, fix=fix))


def _refuse_variants(config: dict[str, Any], path: Path) -> None:
    """Options that change the forward pass: ignoring one would draft at random."""
    eagle = config.get("eagle_config") if isinstance(config.get("eagle_config"), dict) else {}
    used = [key for key in UNSUPPORTED if config.get(key) or (eagle or {}).get(key)]
    if used:
        raise CheckpointError(
            explain(
                "drafter option",
                where=path,
                expected="a plain EAGLE-3 layer",
                found=f"{used[0]} switched on",
                fix="This variant is not supported; tools read the flag differently, so it is not ignored either.",
            )
        )


def _shape(config: dict[str, Any]) -> DrafterShape:
    eagle = config.get("eagle_config") or {}
    layers: Any = eagle.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    return DrafterShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        aux_layers=layers,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_parameters=rope,
        max_position_embeddings=config.get("max_position_embeddings", 2048),
    )


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of a safetensors file, reading its header only, and checking that the data is all there.

    Raises CheckpointError for a missing, truncated or damaged file.
    """
    if not path.exists():
        raise CheckpointError(
            explain(
                "drafter file missing",
                where=path,
                expected="a safetensors file",
                found="nothing",
                fix="Copy the whole folder.",
            )
        )
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        header = stream.read(length) if length <= size else b""
    if len(prefix) < 8 or len(header) < length:
        raise CheckpointError(
            explain(
                "truncated safetensors",
                where=path,
                expected=f"a header of {length} bytes" if len(prefix) == 8 else "at least 8 bytes",
                found=f"a file of {size}",
                fix=COPY_AGAIN,
            )
        )
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged ({error}). {COPY_AGAIN}") from None
    if end != size:
        raise CheckpointError(
            explain("truncated safetensors", where=path, expected=f"{end} bytes", found=f"{size} bytes", fix=COPY_AGAIN)
        )
    return tensors


def check_drafter(folder: Path) -> DrafterShape:
    """Check files, key set, shapes and dtypes of a drafter folder from its headers; return its shape.

    Raises CheckpointError that names the tensor, what was expected and what was found.
    """
    shape = read_shape(folder)
    path = folder / WEIGHTS
    found = read_header(path)
    config = _read_config(folder)
    names, sizes = _names(config, shape, found.keys()), shape.tensors()
    if is_speculators(config):
        found = {name: entry for name, entry in found.items() if name not in UNUSED}
    expected = {names[name]: size for name, size in sizes.items() if name in names}
    if EMBEDDING in found:  # engines take the target's; some exports carry a copy
        expected[EMBEDDING] = (shape.vocab_size, shape.hidden_size)
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            explain(
                "drafter tensors",
                where=path,
                expected=f"exactly {len(expected)} names",
                found=f"missing {missing or 'none'}, unknown {unknown or 'none'}",
                fix="An engine would skip both silently and draft at random: export the drafter again.",
            )
        )
    for name, (dtype, size) in found.items():
        if size != expected[name]:
            raise CheckpointError(
                explain(
                    f"shape of {name}",
                    where=path,
                    expected=list(expected[name]),
                    found=list(size),
                    fix="config.json and weights are not of one drafter: take both from one export.",
                )
            )
        wanted = {"d2t": ("I64",), "t2d": ("BOOL",)}.get(name, FLOAT_DTYPES)
        if dtype not in wanted:
            raise CheckpointError(
                explain(
                    f"dtype of {name}",
                    where=path,
                    expected=" or ".join(wanted),
                    found=dtype,
                    fix="Export the drafter again.",
                )
            )
    return shape


def _names(config: Any, shape: DrafterShape, found: Collection[str]) -> dict[str, str]:
    """SGLang's name of each tensor -> its name in the file."""
    if not is_speculators(config):
        return {name: name for name in shape.tensors()}
    optional = MAPS - set(found) if shape.draft_vocab_size == shape.vocab_size else frozenset()
    return {name: to_speculators(name) for name in shape.tensors() if name not in optional}


def check_fits(
    shape: DrafterShape,
    *,
    hidden_size: int,
    vocab_size: int,
    layers: int,
    where: object,
    captured: tuple[int, ...] | None = None,
) -> None:
    """Refuse a drafter made for another target: hidden size, vocabulary, or layer ids beyond its depth.

    `captured`: the layers whose states it is to read, which must be its own.
    """
    for name, expected, found in (
        ("hidden_size", hidden_size, shape.hidden_size),
        ("vocab_size", vocab_size, shape.vocab_size),
    ):
        if expected != found:
            raise CheckpointError(
                explain(
                    f"drafter for another target: {name}",
                    where=where,
                    expected=f"{expected} (the target's)",
                    found=found,
                    fix="Name a drafter made for this target, or none (drafter.path) to train one.",
                )
            )
    if max(shape.aux_layers) >= layers:
        raise CheckpointError(
            explain(
                "drafter for another target: aux layer ids",
                where=where,
                expected=f"below {layers} (the target's layers)",
                found=list(shape.aux_layers),
                fix="Name a drafter made for this target.",
            )
        )
    if captured is not None and shape.aux_layers != tuple(captured):
        raise CheckpointError(
            explain(
                "drafter listens to other layers",
                where=where,
                expected=f"{list(captured)} (the captured ones)",
                found=list(shape.aux_layers),
                fix=f"Set target.aux_layers to {list(shape.aux_layers)}, and extract in a new run.",
            )
        )


def check_map(d2t: torch.Tensor, t2d: torch.Tensor, folder: Path) -> None:
    ids = torch.arange(len(d2t)) + d2t
    valid = bool(((ids >= 0) & (ids < len(t2d))).all())
    if not valid or not torch.equal(torch.zeros_like(t2d).index_fill_(0, ids, True), t2d):
        raise CheckpointError(
            explain(
                "vocabulary map",
                where=folder / WEIGHTS,
                expected="d2t as offsets (target id - draft id) that mark the same ids as t2d",
                found="ids out of range" if not valid else "two maps that disagree",
                fix="Export the drafter again; absolute ids in d2t are a known fault of other tools.",
            )
        )


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of a safetensors file, from its header."""
    total = 0
    for dtype, size in read_header(path).values():
        count = 1
        for n in size:
            count *= n
        total += count * SAFETENSORS_DTYPES[dtype]
    return total


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """One tensor of a safetensors file, read alone. Raises CheckpointError when it is not there."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}).") from None
