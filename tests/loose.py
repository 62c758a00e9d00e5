"""Files of hidden states as other projects write them, from one sample's states. Slow and plain."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

State = tuple[list[int], list[int], Tensor, Tensor]
"""Ids, loss mask, aux [T, 3H] and last [T, H]."""


def specforge(folder: Path, number: int, state: State) -> Path:
    ids, mask, aux, last = state
    return _torch(
        folder / f"rows_{number // 5 * 5}-{number // 5 * 5 + 5}" / f"data_{number}.ckpt",
        input_ids=torch.tensor(ids), loss_mask=torch.tensor(mask), hidden_state=last[None], aux_hidden_state=aux[None],
    )  # fmt: skip


def specforge_packed(folder: Path, number: int, state: State) -> Path:
    """Compressed, as its option writes them."""
    plain = specforge(folder, number, state)
    file = plain.with_name(plain.name + ".gz")
    file.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return file


def angelslim(folder: Path, number: int, state: State) -> Path:
    """Padded to one length, with an attention mask."""
    ids, mask, aux, last = state
    more = 96 - len(ids)

    def padded(x: Tensor, front: bool = number % 2 == 0) -> Tensor:
        filler = torch.full((more, *x.shape[1:]), 3, dtype=x.dtype)
        return torch.cat([filler, x] if front else [x, filler])[None]

    there = padded(torch.ones(len(ids), dtype=torch.int64)) == 1
    there &= torch.cat([torch.zeros(more), torch.ones(len(ids))] if number % 2 == 0 else [torch.ones(len(ids)), torch.zeros(more)])[None] == 1  # fmt: skip
    return _torch(
        folder / f"rank_{number % 2}" / "rows_0-5000" / f"data_{number}.ckpt",
        input_ids=padded(torch.tensor(ids)), loss_mask=padded(torch.tensor(mask)), attention_mask=there.long(),
        hidden_states=padded(aux), target_hiddens=padded(last),
    )  # fmt: skip


def modelopt(folder: Path, number: int, state: State) -> Path:
    """Padded on the right without a word about it."""
    ids, mask, aux, last = state
    return _torch(
        folder / f"conversation-{number}.pt",
        input_ids=torch.tensor([*ids, 0, 0, 0]), loss_mask=torch.tensor([*mask, 0, 0, 0]),
        hidden_states=torch.cat([last, last[:3]]), aux_hidden_states=torch.cat([aux, aux[:3]]),
        conversation_id=f"conversation-{number}",
    )  # fmt: skip


def speculators(folder: Path, number: int, state: State) -> Path:
    """Without a mask: that is in `write_masks`."""
    ids, _, aux, last = state
    states = torch.stack([*aux.chunk(3, dim=1), last], dim=1)
    file = folder / f"hs_{number}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"token_ids": torch.tensor(ids), "hidden_states": states.contiguous()}, file)
    return file


WRITERS: dict[str, Callable[[Path, int, State], Path]] = {
    "SpecForge": specforge,
    "SpecForge, compressed": specforge_packed,
    "AngelSlim": angelslim,
    "ModelOpt": modelopt,
    "speculators": speculators,
}


def write_masks(folder: Path, states: list[State]) -> Path:
    """A dataset in two files, as `datasets` saves one."""
    folder.mkdir(parents=True)
    table = pa.table({"input_ids": [s[0] for s in states], "loss_mask": [s[1] for s in states]})
    half = len(states) // 2
    for number, part in enumerate((table.slice(0, half), table.slice(half))):
        file = str(folder / f"data-{number:05d}-of-00002.arrow")
        with pa.OSFile(file, "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(part)
    return folder


def _torch(file: Path, **content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    held = io.BytesIO()
    torch.save(content, held)
    file.write_bytes(held.getvalue())
    return file
