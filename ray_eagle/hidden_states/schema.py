"""One row is one sample, unpadded, in a record batch of its own; 16-bit floats are stored as their bits (uint16).

A shard is a plain Arrow file. The record beside it also knows where each row's message lies and its checksum, so a row is one
read of contiguous bytes on any filesystem, and the tensors are views of what was read.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ray_eagle.hidden_states.quantise import dequantise, groups

STATE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": torch.float8_e4m3fn}
"""Of `aux`. `last` is float32 where aux is, else bfloat16."""
AUX_LAYERS = 3
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


@dataclass(frozen=True)
class Sample:
    """One conversation with its states. Tensors of a sample that was read are read-only views of the file."""

    sample_id: str
    source_id: str
    input_ids: Tensor
    """[T] int32."""
    loss_mask: Tensor
    """[T] uint8: 1 where the assistant wrote the token."""
    aux: Tensor
    """[T, 3H] in the dataset's state dtype."""
    last: Tensor
    """[S, H]: the last state, at each s with loss_mask[s+1] = 1."""
    top1: Tensor
    """[S] int32: the teacher's choice over the whole vocabulary."""
    lse: Tensor
    """[S] float32: its log-sum-exp."""
    aux_scale: Tensor | None = None
    """[T, 3G] uint8 with float8 aux states, else None."""

    def aux_states(self, dtype: torch.dtype | None = None) -> Tensor:
        """[T, 3H] aux states as numbers: in `dtype`, or as stored (bfloat16 for float8)."""
        return aux_states(self.aux, self.aux_scale, dtype)


def aux_states(aux_TC: Tensor, scale_TG: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """[T, 3H] aux states as numbers, wherever the tensors are; dequantised when they come with scales [T, 3G]."""
    if scale_TG is None:
        return aux_TC if dtype is None else aux_TC.to(dtype)
    layers = zip(aux_TC.chunk(AUX_LAYERS, 1), scale_TG.chunk(AUX_LAYERS, 1), strict=True)
    return torch.cat([dequantise(values, scales, dtype or torch.bfloat16) for values, scales in layers], dim=1)


def last_dtype(state_dtype: str) -> torch.dtype:
    """How `last` is stored."""
    return torch.float32 if state_dtype == "float32" else torch.bfloat16


def schema(hidden_size: int, state_dtype: str) -> pa.Schema:
    """The Arrow schema of a shard."""

    def rows(value: pa.DataType, width: int) -> pa.DataType:
        return pa.large_list(pa.field("item", pa.list_(pa.field("item", value, nullable=False), width), nullable=False))

    def values(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("item", kind, nullable=False))

    aux = {"float8": pa.uint8(), "bfloat16": pa.uint16(), "float32": pa.float32()}[state_dtype]
    last = pa.float32() if state_dtype == "float32" else pa.uint16()
    columns = {
        "sample_id": pa.string(),
        "source_id": pa.string(),
        "input_ids": values(pa.int32()),
        "loss_mask": values(pa.uint8()),
        "aux": rows(aux, AUX_LAYERS * hidden_size),
    }
    if state_dtype == "float8":
        columns["aux_scale"] = rows(pa.uint8(), AUX_LAYERS * groups(hidden_size))
    columns |= {"last": rows(last, hidden_size), "top1": values(pa.int32()), "lse": values(pa.float32())}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def sample_bytes(tokens: int, teaching: int, hidden_size: int, state_dtype: str) -> int:
    """Payload of one row: aux everywhere, last with top-1 and log-sum-exp where a teacher is, ids and mask."""
    aux = AUX_LAYERS * hidden_size * STATE_DTYPES[state_dtype].itemsize
    scales = AUX_LAYERS * groups(hidden_size) if state_dtype == "float8" else 0
    return tokens * (aux + scales + 5) + teaching * (hidden_size * last_dtype(state_dtype).itemsize + 8)


def sample_id(input_ids: list[int], loss_mask: list[int]) -> str:
    """16 hex digits: hash of tokens and mask, so equal content has one name wherever it came from."""
    content = np.asarray(input_ids, np.int32).tobytes() + np.asarray(loss_mask, np.uint8).tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def encode(sample: Sample, kind: pa.Schema) -> pa.RecordBatch:
    """One record batch of one row; its arrays are views of the sample's tensors."""
    arrays: list[pa.Array] = []
    for field in kind:
        value = getattr(sample, field.name)
        arrays.append(pa.array([value], field.type) if isinstance(value, str) else _one_list(_bits(value), field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=kind)


def decode(batch: pa.RecordBatch) -> Sample:
    """The sample of a one-row batch as zero-copy views. Raises pa.ArrowException for what no writer wrote."""
    batch.validate()  # offsets are data, which may be damaged
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if batch.num_rows != 1 or any(column.null_count for column in columns.values()):
        raise pa.ArrowInvalid(f"expected one row without nulls, found {batch.num_rows} or nulls")
    names = (columns.pop("sample_id"), columns.pop("source_id"))
    tensors = {name: _tensor(column[0].values) for name, column in columns.items()}
    if tensors["aux"].dtype == torch.uint8:
        tensors["aux"] = tensors["aux"].view(torch.float8_e4m3fn)
    return Sample(*(name[0].as_py() for name in names), **tensors)


def _bits(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().contiguous().flatten()
    return flat.view(_BITS.get(flat.dtype, flat.dtype)).numpy()


def _one_list(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    items = pa.array(values)
    if isinstance(kind, pa.LargeListType):
        width = kind.value_type.list_size
        rows = pa.FixedSizeListArray.from_arrays(items, type=kind.value_type)
        return pa.LargeListArray.from_arrays(pa.array([0, len(values) // width], pa.int64()), rows, type=kind)
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), items, type=kind)


def _tensor(values: pa.Array) -> Tensor:
    """The numbers of a list, or the rows of a list of rows; uint16 are the bits of bfloat16."""
    if isinstance(values, pa.FixedSizeListArray):
        width = values.type.list_size
        flat = values.values.slice(values.offset * width, len(values) * width)  # `.values` honours no offset
        return _tensor(flat).view(-1, width)
    tensor = torch.from_dlpack(values) if len(values) else torch.from_numpy(values.to_numpy().copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
