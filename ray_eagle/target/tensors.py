"""The tensors of a safetensors folder, known from its index and headers alone."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_eagle.errors import TargetError, explain

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOWERS = r"(?:^|[._])(?:vision|visual|image|audio|mm_projector|multi_modal_projector)"
OTHER_TOWERS = re.compile(TOWERS)
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
NORM = "norm.weight"
"""The final norm, under the prefix of the embedding: multi-token prediction has norms of that name elsewhere."""
LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")
"""`blocks` is what transformers 5 makes of a Kimi-K2.5 that it saves."""


@dataclass(frozen=True)
class TensorHeader:
    dtype: str
    """As safetensors spells it: F32, BF16, I32..."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, from the index (no other file is opened) or from the only file's header.

    Raises TargetError when there is neither.
    """
    index = folder / INDEX
    if (folder / SINGLE).exists():
        return dict.fromkeys(read_header(folder / SINGLE), folder / SINGLE)
    if not index.exists():
        raise TargetError(
            explain(
                "target weights",
                where=folder,
                expected=f"{SINGLE} or {INDEX}",
                found="neither",
                fix="Use a folder with safetensors.",
            )
        )
    try:
        by_name: dict[str, str] = json.loads(index.read_text())["weight_map"]
        paths = {file: folder / file for file in set(by_name.values())}  # once a file: there may be 200,000 tensors
        return {name: paths[file] for name, file in by_name.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{index} is not a safetensors index ({error!r}). Copy the file again.") from None


def read_header(file: Path) -> dict[str, TensorHeader]:
    """What a safetensors file holds. Raises TargetError naming the file when it is missing, damaged or cut short."""
    if not file.exists():
        raise TargetError(
            explain("target weights", where=file, expected="a file", found="nothing", fix="Copy the file again.")
        )
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        raw = stream.read(length) if length <= size else b""
    try:
        entries: dict[str, Any] = json.loads(raw)
        entries.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        headers = {name: TensorHeader(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(file, "a safetensors header", f"none in {size} bytes") from None
    if size != needed:
        raise _damaged(file, f"{needed} bytes by its header", f"{size}")
    return headers


def open_tensors(files: dict[str, Path], names: Iterable[str]) -> dict[str, Any]:
    """Lazy slices of the named tensors: no data is read before a slice is indexed. Only the files that hold them are opened.

    Raises TargetError naming the file when it is missing, cut short, or lacks a tensor that the index puts there.
    """
    from safetensors import safe_open

    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    slices = {}
    for file, wanted in by_file.items():
        if absent := sorted(set(wanted) - set(read_header(file))):
            raise _damaged(file, f"the tensor {absent[0]} by {INDEX}", "a file without it")
        with safe_open(file, framework="pt") as opened:
            slices.update({name: opened.get_slice(name) for name in wanted})
    return slices


def own_tensor(names: Iterable[str], suffix: str) -> str | None:
    """The language model's tensor whose name ends with `suffix`, through any prefix (`language_model.model.`), or None.

    Towers for other senses, and copies in extra layers (multi-token prediction), are passed over.
    """
    matches = (name for name in names if name == suffix or name.endswith("." + suffix))
    own = [name for name in matches if not OTHER_TOWERS.search(name)]
    if not LAYER.match(suffix):
        own = [name for name in own if layer_of(name) is None]
    return min(own, key=len, default=None)


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, by its name; None for the rest, towers for other senses included."""
    found = LAYER.search(name)
    return int(found[1]) if found and not OTHER_TOWERS.search(name) else None


def _damaged(file: Path, expected: str, found: str) -> TargetError:
    return TargetError(
        explain("target weights", where=file, expected=expected, found=found, fix="The file is damaged: copy it again.")
    )
