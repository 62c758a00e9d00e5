"""One row is one sample, unpadded, in a record batch of its own; 16-bit floats are stored as their bits (uint16)."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ray_eagle.errors import DatasetError

STATE_DTYPES = {"bfloat16": (torch.bfloat16, pa.uint16()), "float32": (torch.float32, pa.float32())}
PAYLOAD = ("input_ids", "loss_mask", "aux", "last", "top1", "lse")
"""The columns that the checksum of a row covers, in order, after sample_id and source_id."""


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


def schema(hidden_size: int, state_dtype: str) -> pa.Schema:
    """The Arrow schema of a shard."""
    value = STATE_DTYPES[state_dtype][1]

    def rows(width: int) -> pa.DataType:
        return pa.large_list(pa.field("item", pa.list_(pa.field("item", value, nullable=False), width), nullable=False))

    def values(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("item", kind, nullable=False))

    return pa.schema(
        [
            pa.field("sample_id", pa.string(), nullable=False),
            pa.field("source_id", pa.string(), nullable=False),
            pa.field("input_ids", values(pa.int32()), nullable=False),
            pa.field("loss_mask", values(pa.uint8()), nullable=False),
            pa.field("aux", rows(3 * hidden_size), nullable=False),
            pa.field("last", rows(hidden_size), nullable=False),
            pa.field("top1", values(pa.int32()), nullable=False),
            pa.field("lse", values(pa.float32()), nullable=False),
            pa.field("checksum", pa.string(), nullable=False),
        ]
    )


def sample_id(input_ids: list[int], loss_mask: list[int]) -> str:
    """16 hex digits: hash of tokens and mask, so equal content has one name wherever it came from."""
    content = np.asarray(input_ids, np.int32).tobytes() + np.asarray(loss_mask, np.uint8).tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def encode(sample: Sample, kind: pa.Schema) -> pa.RecordBatch:
    """One record batch of one row, its checksum included."""
    columns = {name: _bits(getattr(sample, name)) for name in PAYLOAD}
    arrays: list[pa.Array] = []
    for field in kind:
        if field.name in ("sample_id", "source_id"):
            arrays.append(pa.array([getattr(sample, field.name)], pa.string()))
        elif field.name == "checksum":
            arrays.append(pa.array([_checksum(sample.sample_id, sample.source_id, columns)], pa.string()))
        else:
            arrays.append(_one_list(columns[field.name], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=kind)


def decode(batch: pa.RecordBatch, *, check: bool = False) -> Sample:
    """The sample of a one-row batch as zero-copy views. With `check`, raises DatasetError when the checksum is off."""
    columns = {name: _flat(batch.column(name)) for name in PAYLOAD}
    names = batch.column("sample_id")[0].as_py(), batch.column("source_id")[0].as_py()
    if check:
        stored, found = batch.column("checksum")[0].as_py(), _checksum(*names, columns)
        if stored != found:
            raise DatasetError(f"sample {names[0]} ({names[1]}): checksum {stored} was stored, {found} found")
    tensors = {name: _tensor(array) for name, array in columns.items()}
    width = batch.schema.field("last").type.value_type.list_size
    aux, last = tensors["aux"], tensors["last"]
    if aux.dtype == torch.uint16:
        aux, last = aux.view(torch.bfloat16), last.view(torch.bfloat16)
    return Sample(
        *names,
        tensors["input_ids"],
        tensors["loss_mask"],
        aux.view(-1, 3 * width),
        last.view(-1, width),
        tensors["top1"],
        tensors["lse"],
    )


def _bits(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().contiguous().flatten()
    return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()


def _one_list(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    items = pa.array(values)
    if isinstance(kind, pa.LargeListType):
        width = kind.value_type.list_size
        rows = pa.FixedSizeListArray.from_arrays(items, type=kind.value_type)
        return pa.LargeListArray.from_arrays(pa.array([0, len(values) // width], pa.int64()), rows, type=kind)
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), items, type=kind)


def _flat(column: pa.Array) -> pa.Array:
    """The values of a list column as one flat array; `flatten` honours offsets, `.values` would not."""
    flat = column.flatten()
    return flat.flatten() if isinstance(flat, pa.FixedSizeListArray) else flat


def _tensor(array: pa.Array) -> Tensor:
    return torch.from_dlpack(array) if len(array) else torch.from_numpy(array.to_numpy().copy())


def _checksum(name: str, source: str, columns: dict[str, np.ndarray] | dict[str, pa.Array]) -> str:
    digest = hashlib.blake2b(f"{name}\0{source}\0".encode(), digest_size=16)
    for key in PAYLOAD:
        values = columns[key]
        digest.update(
            np.ascontiguousarray(values if isinstance(values, np.ndarray) else values.to_numpy()).view(np.uint8)
        )
    return digest.hexdigest()
