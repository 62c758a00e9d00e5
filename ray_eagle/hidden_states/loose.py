"""Hidden states that other projects left behind, one file a sample: SpecForge, AngelSlim, ModelOpt, speculators.

Which of them wrote a file shows in its keys. Files are mapped into memory, so token ids are read without the states beside
them, and nothing in them is ever run (`weights_only`).
"""

import gzip
import io
import math
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from ray_eagle.errors import InputError, explain

ENDINGS = (".ckpt", ".ckpt.gz", ".pt", ".safetensors")
ZIP = b"PK\3\4"
FIX = "See docs/import.md for the layouts that are read."


@dataclass(frozen=True)
class Layout:
    """Names of the tensors in a project's files."""

    project: str
    ids: str
    aux: str
    last: str
    """The same as `aux` where one tensor [T, layers, H] holds the aux states and then the last one."""


LAYOUTS = (
    Layout("SpecForge", "input_ids", "aux_hidden_state", "hidden_state"),
    Layout("AngelSlim", "input_ids", "hidden_states", "target_hiddens"),
    Layout("ModelOpt", "input_ids", "aux_hidden_states", "hidden_states"),
    Layout("speculators", "token_ids", "hidden_states", "hidden_states"),
)
MASK, KEPT = "loss_mask", "attention_mask"


@dataclass(frozen=True)
class LooseSample:
    """What one file holds, without padding. States stay in the file until they are asked for."""

    project: str
    ids_T: Tensor
    """[T] int64."""
    mask_T: Tensor | None
    """[T] bool: what the assistant wrote; None where the file has no mask."""
    kept_T: Tensor | slice
    """Which of the stored rows are no padding."""
    stored_aux: Tensor
    """[rows, 3H] or [rows, 3, H]."""
    stored_last: Tensor
    """[rows, H]."""

    @property
    def aux_TC(self) -> Tensor:
        """[T, 3H], in the dtype of the file."""
        return self.stored_aux[self.kept_T].flatten(1)

    @property
    def last_TH(self) -> Tensor:
        """[T, H], in the dtype of the file."""
        return self.stored_last[self.kept_T]


def find_files(folder: Path) -> list[str]:
    """Names of all state files below a folder, numbers in their order. Raises InputError when there are none."""
    found = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.name.endswith(ENDINGS)]
    if not found:
        raise InputError(
            explain(
                "states.path",
                where=folder,
                expected=f"files with hidden states ({', '.join(ENDINGS)})",
                found="none" if folder.is_dir() else "no folder",
                fix=FIX,
            )
        )
    return sorted(found, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)])


def read_sample(folder: Path, name: str, hidden_size: int) -> LooseSample:
    """One file. Raises InputError naming it for anything that is no intact sample of a target of this hidden size."""
    file = folder / name
    tensors = _tensors(file)
    layout = next((one for one in LAYOUTS if {one.ids, one.aux, one.last} <= tensors.keys()), None)
    if layout is None:
        expected = "; ".join(f"{', '.join(dict.fromkeys((x.ids, x.aux, x.last)))} ({x.project})" for x in LAYOUTS)
        raise _bad(file, f"the tensors {expected}", ", ".join(sorted(tensors)) or "no tensor")
    ids_T = _sample(file, tensors[layout.ids], 1).long()
    if layout.aux == layout.last:
        states_TLH = _sample(file, tensors[layout.aux], 3)
        aux, last = states_TLH[:, :-1], states_TLH[:, -1]
    else:
        aux, last = (_sample(file, tensors[key], 2) for key in (layout.aux, layout.last))
    mask_T = _sample(file, tensors[MASK], 1).bool() if MASK in tensors else None
    shapes = (len(aux), math.prod(aux.shape[1:])), tuple(last.shape)
    wanted = (len(ids_T), 3 * hidden_size), (len(ids_T), hidden_size)
    if shapes != wanted or (mask_T is not None and mask_T.shape != ids_T.shape):
        masked = "" if mask_T is None else f", loss_mask {list(mask_T.shape)}"
        raise _bad(
            file,
            f"{layout.aux} {list(wanted[0])} and {layout.last} {list(wanted[1])} for {len(ids_T)} tokens and the target's "
            f"hidden size of {hidden_size}",
            f"{list(shapes[0])} and {list(shapes[1])}{masked}",
        )
    kept_T = _sample(file, tensors[KEPT], 1).bool() if KEPT in tensors else slice(None)
    return LooseSample(layout.project, ids_T[kept_T], None if mask_T is None else mask_T[kept_T], kept_T, aux, last)


def _tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a file, by name; mapped, where the file allows that."""
    if file.is_file() and (damage := _damage(file)):
        raise _bad(file, "an intact file of tensors", damage)
    try:
        if file.name.endswith(".safetensors"):
            from safetensors import safe_open

            with safe_open(file, framework="pt") as opened:
                return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
        if file.name.endswith(".gz"):
            content: Any = torch.load(io.BytesIO(gzip.decompress(file.read_bytes())), "cpu", weights_only=True)
        else:
            content = torch.load(file, "cpu", weights_only=True, mmap=True)
    except Exception as error:  # zip, pickle and safetensors errors have no common base
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise _bad(file, "an intact file of tensors", f"{reason[0][:200]}") from None
    if not isinstance(content, dict):
        raise _bad(file, "a dictionary of tensors", type(content).__name__)
    return {key: value for key, value in content.items() if isinstance(value, Tensor)}


def _damage(file: Path) -> str:
    """What torch tells as `Invalid argument`, or with advice about its own arguments; empty where the file may be read."""
    with file.open("rb") as stream:
        begin = stream.read(4)
    if not begin:
        return "an empty file"
    if not file.name.endswith((".ckpt", ".pt")) or zipfile.is_zipfile(file):
        return ""
    if begin == ZIP:
        return "a file that was cut short (its end is missing)"
    return "no zip file of torch.save, but another kind, such as a plain pickle, which is never opened"


def _sample(file: Path, tensor: Tensor, dims: int) -> Tensor:
    """Without the batch dimension that some projects leave in front."""
    if tensor.dim() == dims + 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != dims:
        raise _bad(file, f"one sample a file ({dims} dimensions, or one of size 1 more)", f"{list(tensor.shape)}")
    return tensor


def _bad(file: Path, expected: str, found: str) -> InputError:
    return InputError(explain("hidden states", where=file, expected=expected, found=found, fix=FIX))


class Masks:
    """Loss masks that a project keeps apart: a dataset folder (Arrow) with a row for each file, by the number in its name."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError when there is no such dataset."""
        files = sorted(folder.glob("*.arrow"))
        try:
            tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
            self.table = pa.concat_tables(table.select(["input_ids", MASK]) for table in tables)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise InputError(
                explain(
                    "states.masks",
                    where=folder,
                    expected=f"*.arrow files with the columns input_ids and {MASK}, as speculators' preprocessing writes them",
                    found=str(error).splitlines()[0] if files else "no *.arrow file",
                    fix=FIX,
                )
            ) from None

    def of(self, name: str, ids: list[int]) -> list[int]:
        """The mask of a file's tokens. Raises InputError when its row is missing or has other tokens."""
        numbers = re.findall(r"\d+", name.rpartition("/")[2])
        row = int(numbers[-1]) if numbers else -1
        if not 0 <= row < self.table.num_rows:
            raise InputError(
                f"{name}: expected a row of states.masks ({self.table.num_rows} rows), found number {row}."
            )
        there, mask = (self.table.column(key)[row].as_py() for key in ("input_ids", MASK))
        if list(there[: len(ids)]) != ids or len(mask) < len(ids):
            raise InputError(f"{name}: expected the tokens of row {row} of states.masks, found others.")
        return [int(x) for x in mask[: len(ids)]]


def spans(mask: list[int]) -> Iterator[list[int]]:
    """[start, end) of each run of ones."""
    start = None
    for i, on in enumerate([*mask, 0]):
        if on and start is None:
            start = i
        elif not on and start is not None:
            yield [start, i]
            start = None
