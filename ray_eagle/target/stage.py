"""Load a target, or only a contiguous share of its layers: no other weights are read, on disk or into host memory.

The model is instantiated without memory (meta device), layers that live elsewhere become pass-through modules, and
transformers' own loader fills in the rest from lazy slices of the safetensors files. So its key mappings and weight
conversions work (fused experts of mixture-of-experts models), and tensors go straight to the device.

Weights of a quantised target stay packed (`packed.py`): transformers never sees them.

Mixture-of-experts layers run on transformers' default implementation: grouped matrix products, which on a GPU in
bfloat16 neither wait for it nor depend on which experts a pack visits.
"""

from typing import Any

import torch
from torch import nn

from ray_eagle.config import TargetConfig
from ray_eagle.errors import TargetError, explain
from ray_eagle.target.attention import PACKED, packed_attention_fits, register_packed_attention
from ray_eagle.target.capture import Stage
from ray_eagle.target.checks import PassThrough, check_documents, check_head, check_split
from ray_eagle.target.families import skeleton
from ray_eagle.target.loading import TargetFacts, check_rows, choose_dtype
from ray_eagle.target.packed import PackedWeights
from ray_eagle.target.parts import built, drop_towers, find_parts
from ray_eagle.target.sizes import read_text_config
from ray_eagle.target.tensors import EMBEDDING, OTHER_TOWERS, layer_of, open_tensors, tensor_files

NAMED = 4
"""Missing tensors that an error names one by one."""


def load_stage(facts: TargetFacts, config: TargetConfig, device: torch.device, layers: range | None = None) -> Stage:
    """The stage that holds `layers` (None: all), in eval mode on the device; every part of it comes from the checkpoint.

    The embedding is there with layer 0, the final norm and the head with the last layer. Raises TargetError when tensors
    or files are missing, damaged or of the wrong shape, and for a family that fails one of `checks`.
    """
    layers = _checked(layers, facts)
    whole = len(layers) == facts.layers
    try:
        register_packed_attention()
        empty = skeleton(facts.path, config.trust_remote_code)
        settings = empty.config
        settings._attn_implementation = _attention(config, empty)
        parts = find_parts(empty)
        tied = settings.get_text_config().tie_word_embeddings or settings.tie_word_embeddings
        if not whole:  # embedding and head live apart: each is loaded for itself
            settings.tie_word_embeddings = settings.get_text_config().tie_word_embeddings = False
        names = {module: name for name, module in empty.named_modules()}
        model = _load(facts, settings, type(empty), layers, tied, f"{names[parts.head]}.weight", config, device)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        raise TargetError(f"target {facts.path} cannot be loaded: {error}") from error
    stage = Stage(find_parts(model), layers, facts.aux_layers, device, facts.logits)
    if not whole:
        check_split(stage, facts)
    if stage.last:
        check_head(model, stage, facts)
    check_documents(stage, facts)
    return stage


def load_model(facts: TargetFacts, config: TargetConfig, device: torch.device, dtype: str = "") -> Any:
    """The transformers causal language model in eval mode, without towers for other senses, for generation.

    `dtype`: instead of target.dtype. Raises TargetError as `load_stage` does, but for the checks.
    """
    from transformers import GenerationConfig

    try:
        empty = skeleton(facts.path, config.trust_remote_code)
        empty.config._attn_implementation = _plain_attention(config, empty)
        config = config.model_copy(update={"dtype": dtype or config.dtype})
        model = _load(facts, empty.config, type(empty), range(facts.layers), False, "", config, device)
        if (facts.path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(facts.path)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        raise TargetError(f"target {facts.path} cannot be loaded: {error}") from error
    return model


def _checked(layers: range | None, facts: TargetFacts) -> range:
    layers = range(facts.layers) if layers is None else layers
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= facts.layers:
        raise TargetError(
            f"stage of {facts.path}: expected contiguous layers from 0 to {facts.layers - 1}, found {layers}."
        )
    return layers


def _attention(config: TargetConfig, model: Any) -> str:
    """`sdpa` becomes packed attention wherever that fits; elsewhere transformers masks documents by their positions."""
    fits = config.attention == "sdpa" and packed_attention_fits(model.config) is None
    return PACKED if fits and getattr(model, "_supports_attention_backend", False) else _plain_attention(config, model)


def _plain_attention(config: TargetConfig, model: Any) -> str:
    """target.attention, or `eager` for a model that transformers cannot run on PyTorch's scaled_dot_product_attention."""
    return "eager" if config.attention == "sdpa" and not model._supports_sdpa else config.attention


def _load(
    facts: TargetFacts,
    settings: Any,
    model_class: Any,
    layers: range,
    tied: bool,
    head: str,
    config: TargetConfig,
    device: torch.device,
) -> Any:
    files = tensor_files(facts.path)
    packed = PackedWeights.of(read_text_config(facts.path), facts.path, files)
    whole, last = len(layers) == facts.layers, layers.stop == facts.layers
    lonely_head = tied and last and not whole and not any(name.endswith(head) for name in files)
    wanted = [name for name in files if _belongs(name, layers, last, lonely_head)]
    if packed:
        wanted = [name for name in wanted if not packed.holds(name)]
        _forget_quantisation(settings)
    tensors = open_tensors(files, wanted)
    check_rows(facts, {name: tuple(tensor.get_shape()) for name, tensor in tensors.items() if layer_of(name) is None})
    if lonely_head:
        [embedding] = (name for name in wanted if name.endswith(EMBEDDING))
        tensors[head] = tensors.pop(embedding)

    def prepare(model: Any) -> None:
        _drop_absent(model, layers)
        if packed:
            packed.replace(find_parts(model).layers, layers)

    staged = built(model_class, prepare)
    model, found = staged.from_pretrained(
        None,
        config=settings,
        state_dict=tensors,
        dtype=choose_dtype(config.dtype, device),
        device_map=None if device.type == "cpu" else {"": device},
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
    )
    wrong = [
        f"{name} {tuple(shape)} instead of {tuple(expected)}" for name, shape, expected in found["mismatched_keys"]
    ]
    lost = [*sorted(found["missing_keys"]), *(f"{name} (never loaded)" for name in _on_meta(model))]
    if lost or wrong:
        raise TargetError(
            explain(
                "target weights",
                where=facts.path,
                expected=f"all tensors of layers {layers.start}-{layers.stop - 1} as config.json describes them",
                found=f"missing {_some(lost)}" if lost else _some(wrong),
                fix="The checkpoint is incomplete or belongs to another config: copy it again.",
            )
        )
    if packed:
        packed.fill(find_parts(model).layers, layers, device)
    return model


def _forget_quantisation(settings: Any) -> None:
    """Or transformers would want the library that made it."""
    for one in (settings, settings.get_text_config()):
        if hasattr(one, "quantization_config"):
            del one.quantization_config


def _belongs(name: str, layers: range, last: bool, lonely_head: bool) -> bool:
    """Whether a checkpoint's tensor is for this stage, by its name. What cannot be told apart goes to every stage, unread."""
    layer = layer_of(name)
    if layer is not None:
        return layer in layers
    if OTHER_TOWERS.search(name):
        return False
    if name.endswith(EMBEDDING):
        return layers.start == 0 or lonely_head
    return last


def _drop_absent(model: Any, layers: range) -> None:
    """Replace what another stage holds, and what no stage needs, by modules without weights."""
    drop_towers(model)
    parts = find_parts(model)
    last = layers.stop == len(parts.layers)
    for index, layer in enumerate(parts.layers):
        if index not in layers:
            parts.layers[index] = PassThrough(layer)
    if layers.start > 0:
        model.set_input_embeddings(nn.Identity())
    if not last:
        parts.decoder.norm = nn.Identity()
        model.set_output_embeddings(nn.Identity())


def _on_meta(model: Any) -> list[str]:
    return [
        name for named in (model.named_parameters(), model.named_buffers()) for name, tensor in named if tensor.is_meta
    ]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
