"""The drafter folder that SGLang loads: write it, read it, and check every key and shape from the headers. Folders of other
tools are read as well, as far as their drafter is a plain EAGLE-3 layer.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ray_eagle.drafter.contents import check_map, read_contents, read_map, tensor_faults
from ray_eagle.drafter.files import WEIGHTS, fault, read_tensors
from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.sglang import sglang_config
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.variant import fit_faults, read_variant, refuse_untrainable


def save_drafter(drafter: Drafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the SGLang folder and check it as a reader would. Weights in `dtype`, d2t int64 offsets, t2d bool."""
    check_map(drafter.d2t.cpu().numpy(), drafter.t2d.cpu().numpy(), folder / WEIGHTS)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.detach().to("cpu", dtype) if tensor.is_floating_point() else tensor.detach().cpu()).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    temporary = folder / f".{WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / WEIGHTS)
    config = sglang_config(drafter.shape, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    check_drafter(folder)


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter of a folder in SGLang's or speculators' format, weights in `dtype` on the CPU.

    Raises CheckpointError as `check_drafter`, for weights that are not finite, and for a vocabulary map that is none.
    """
    shape = check_drafter(folder)
    variant = read_variant(folder)
    contents = read_contents(folder, variant)
    names = {contents.names[name]: name for name in shape.tensors() if name in contents.stored}
    found = read_tensors({there: contents.stored[here] for there, here in names.items()})
    for there, tensor in found.items():
        _refuse_infinite(tensor, there, contents.stored[names[there]].file)
    # without maps (a drafter of the whole vocabulary) each draft token is the target's of the same id
    d2t, t2d = read_map(variant, contents)
    check_map(d2t, t2d, contents.where)
    drafter = Drafter(shape)
    drafter.load_state_dict(
        {"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)}
        | {names[there]: tensor for there, tensor in found.items()}
    )
    return drafter.to(dtype)


def _refuse_infinite(tensor: torch.Tensor, name: str, file: Path) -> None:
    """One NaN makes every draft NaN, and the loss: the data and the learning rate would be blamed."""
    if tensor.is_floating_point() and (wrong := tensor.numel() - int(tensor.isfinite().sum())):
        raise fault(
            "drafter weights",
            where=f"{file}, {name}",
            expected="finite numbers",
            found=f"{wrong} of {tensor.numel()} that are NaN or infinite",
            fix="Export the drafter from an earlier checkpoint, or copy the file again if it was damaged on the way.",
        )


def read_shape(folder: Path) -> DrafterShape:
    """The shape that config.json states. Raises CheckpointError as `read_variant`, and for what cannot be trained."""
    variant = read_variant(folder)
    refuse_untrainable(variant, folder / "config.json")
    return variant.shape


def check_drafter(folder: Path) -> DrafterShape:
    """Check files, key set, shapes and dtypes of a drafter folder from its headers; return its shape.

    Raises CheckpointError that names the tensor, what was expected and what was found.
    """
    variant = read_variant(folder)
    refuse_untrainable(variant, folder / "config.json")
    for problem in tensor_faults(variant, read_contents(folder, variant)):
        raise problem
    return variant.shape


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
    for problem in fit_faults(shape, hidden_size=hidden_size, vocab_size=vocab_size, layers=layers, where=where):
        raise problem
    if captured is not None and shape.aux_layers != tuple(captured):
        fix = f"Set target.aux_layers to {list(shape.aux_layers)}, and extract in a new run."
        expected = f"{list(captured)} (the captured ones)"
        raise fault(
            "drafter listens to other layers", where=where, expected=expected, found=list(shape.aux_layers), fix=fix
        )
