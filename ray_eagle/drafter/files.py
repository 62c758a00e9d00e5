"""The files of a drafter folder: config.json, and the headers of its safetensors. Tensors are read one at a time."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ray_eagle.errors import CheckpointError, explain

if TYPE_CHECKING:  # the commands that read headers alone answer before torch is loaded
    import torch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAFETENSORS_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1}
FLOAT_DTYPES = ("F32", "F16", "BF16")
COPY_AGAIN = "Copy the file again and compare its size with the source."
LFS_POINTER = b"version https://git-lfs"


def fault(what: str, *, where: object, expected: object, found: object, fix: str) -> CheckpointError:
    """The error of these five parts, which can be told as a finding too."""
    error = CheckpointError(explain(what, where=where, expected=expected, found=found, fix=fix))
    error.fix = fix
    return error


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, by a header."""

    file: Path
    dtype: str
    """As safetensors spells it: F32, BF16, I64..."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    bytes: int


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of the folder. Raises CheckpointError when it is missing or no JSON object."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise fault("no drafter", where=folder, expected="a folder", found="nothing", fix="Check drafter.path.")
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        fix = "Copy the whole folder."
        raise fault("drafter file missing", where=path, expected="config.json", found="nothing", fix=fix) from None
    except ValueError as error:
        raise _damaged(f"{path} is not valid JSON ({error}).", "Copy the file again.") from None
    if not isinstance(config, dict):
        found = f"a JSON {type(config).__name__}"
        raise fault("drafter config", where=path, expected="an object", found=found, fix="Copy the file again.")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors that hold the drafter: one file, or those that an index names.

    Raises CheckpointError for a damaged index, and where there are no safetensors at all.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).exists() or not index.exists():
        pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
        if pickles and not (folder / WEIGHTS).exists():
            fix = "Load it with the tool that wrote it, and save it as safetensors; pickles are never opened here."
            raise fault(
                "drafter file missing", where=folder / WEIGHTS, expected="a safetensors file", found=pickles[0], fix=fix
            )
        return [folder / WEIGHTS]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(f"{index} is not a safetensors index ({error!r}).", "Copy the file again.") from None


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by its name, from the headers alone. Raises CheckpointError as `read_stored`."""
    return {name: tensor for file in weight_files(folder) for name, tensor in read_stored(file).items()}


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of a safetensors file. Raises CheckpointError as `read_stored`."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in read_stored(path).items()}


def read_stored(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, reading its header only, and checking that the data is all there.

    Raises CheckpointError for a missing, truncated or damaged file.
    """
    if not path.exists():
        fix = "Copy the whole folder."
        raise fault("drafter file missing", where=path, expected="a safetensors file", found="nothing", fix=fix)
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        header = stream.read(length) if length <= size else b""
    if prefix == LFS_POINTER[:8]:
        fix = "Fetch the file itself: git lfs pull."
        raise fault("drafter file", where=path, expected="a safetensors file", found="a Git LFS pointer", fix=fix)
    if len(prefix) < 8 or len(header) < length:
        expected = f"a header of {length} bytes" if len(prefix) == 8 else "at least 8 bytes"
        raise fault("truncated safetensors", where=path, expected=expected, found=f"a file of {size}", fix=COPY_AGAIN)
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        tensors = {name: _stored(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(f"{path}: the safetensors header is damaged ({error}).", COPY_AGAIN) from None
    end = max((tensor.start + tensor.bytes for tensor in tensors.values()), default=8 + length)
    if end != size:
        what = "truncated safetensors" if size < end else "safetensors with more than their tensors"
        raise fault(what, where=path, expected=f"{end} bytes", found=f"{size} bytes", fix=COPY_AGAIN)
    return tensors


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of a safetensors file, from its header."""
    return sum(math.prod(size) * SAFETENSORS_DTYPES[dtype] for dtype, size in read_header(path).values())


def read_tensor(path: Path, name: str) -> "torch.Tensor":
    """One tensor of a safetensors file, read alone. Raises CheckpointError when it is not there."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}).") from None


def read_tensors(names: Mapping[str, StoredTensor]) -> "dict[str, torch.Tensor]":
    """The named tensors, each file opened once. Raises CheckpointError where header and data contradict each other."""
    return _read(names, "pt")


def read_arrays(names: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    """As `read_tensors`, of integers and booleans, without torch."""
    return _read(names, "np")


def _read(names: Mapping[str, StoredTensor], framework: str) -> dict[str, Any]:
    found = {}
    for path in {tensor.file for tensor in names.values()}:
        try:
            with safe_open(path, framework=framework) as file:
                found.update({name: file.get_tensor(name) for name, stored in names.items() if stored.file == path})
        except SafetensorError as error:  # sizes and offsets of the header contradict each other
            raise _damaged(f"{path}: the safetensors header is damaged ({error}).", COPY_AGAIN) from None
    return found


def _stored(path: Path, data: int, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(path, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)


def _damaged(message: str, fix: str) -> CheckpointError:
    error = CheckpointError(f"{message} {fix}")
    error.fix = fix
    return error
