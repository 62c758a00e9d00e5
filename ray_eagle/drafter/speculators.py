"""Drafter folders of the speculators library (0.3 to 0.9): what their config says in SGLang's terms, and such a config.

The Llama config lies under `transformer_layer_config`, without what equals LlamaConfig's defaults; the layer is called
`layers.0`; a layer id k means the *input* of layer k, which is the output of layer k-1. d2t holds offsets, as in SGLang's
folders; both maps are absent where the drafter says every target token. A copy of the target's embedding comes along.
"""

from pathlib import Path
from typing import Any

from ray_eagle.drafter.files import fault
from ray_eagle.drafter.keys import ORIGINAL, check_keys
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.target.layers import default_aux_layers
from ray_eagle.target.sizes import text_rope

MODEL_TYPE = "speculators_model_type"
LAYERS = "eagle_aux_hidden_state_layer_ids"
NESTED = "transformer_layer_config"
ARCHITECTURE = "Eagle3DraftModel"
VERSION = "0.9.0"
"""Of the library whose files were read for this; written into configs that are made here."""
ONE_LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 1}
"""Keys of the nested config that may have one value."""
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
"""Of transformers' LlamaConfig, which takes seconds to import."""
UNUSED = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})
"""Copies of the target's tensors: the target is there itself."""


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json was written by speculators."""
    return MODEL_TYPE in config or "speculators_config" in config


def speculators_shape(
    config: dict[str, Any], path: Path, layers: int | None = None, outputs: tuple[int, int, int] | None = None
) -> DrafterShape:
    """The shape that the config states, layer ids as "output of layer L". Raises CheckpointError for another layer.

    layers: of the target, where it is known: a config without ids then means the ones that engines take by default.
    outputs: layer ids, as outputs of layers, that count whatever the config says.
    Raises KeyError, TypeError, ValueError or pydantic's ValidationError where it is damaged.
    """
    _refuse("speculator", path, MODEL_TYPE, "eagle3", config.get(MODEL_TYPE))
    nested = config[NESTED]
    if not isinstance(nested, dict):
        where = f"{path}, {NESTED}"
        raise fault("drafter config", where=where, expected="an object", found=repr(nested), fix=ORIGINAL)
    layer = LLAMA_DEFAULTS | {"model_type": None} | nested
    check_keys(layer, path, f"{NESTED}.")
    for key, wanted in ONE_LLAMA.items():
        _refuse("drafter layer", path, f"{NESTED}.{key}", wanted, layer[key])
    heads = layer["num_attention_heads"]
    return DrafterShape(
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
        vocab_size=layer["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        aux_layers=outputs or _outputs(config, path, layers),
        rms_norm_eps=layer["rms_norm_eps"],
        rope_parameters={key: value for key, value in text_rope(layer).items() if value is not None},
        max_position_embeddings=layer["max_position_embeddings"],
    )


def speculators_config(
    layer: dict[str, Any],
    ids: list[int],
    options: dict[str, Any],
    verifier: tuple[str | None, list[str]],
    steps: int = 3,
) -> dict[str, Any]:
    """config.json as speculators 0.9.0 writes it.

    layer: the Llama config, `draft_vocab_size` among its keys. ids: inputs of layers. options: those that are not off.
    verifier: path or name of the target, if known, and its architectures.
    """
    nested = dict(layer)
    name, architectures = verifier
    return {
        "architectures": [ARCHITECTURE],
        MODEL_TYPE: "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": nested.pop("draft_vocab_size"),
        "tie_word_embeddings": False,
        LAYERS: ids,
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "target_hidden_size": None,
        **options,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": steps,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": architectures, "name_or_path": name},
        },
        NESTED: nested,
    }


def _outputs(config: dict[str, Any], path: Path, layers: int | None) -> tuple[int, int, int]:
    """Its layer ids as outputs: one less each."""
    ids = config.get(LAYERS)
    if ids is None and layers is not None:
        return default_aux_layers(layers)
    if ids is None:
        found, fix = "none", "speculators then means 2, n//2 and n-3 of the target's n layers: write them there."
    elif not (isinstance(ids, list) and len(ids) == 3 and all(isinstance(i, int) and i >= 1 for i in ids)):
        found, fix = str(ids), "Only drafters of the outputs of three decoder layers are supported."
    else:
        return ids[0] - 1, ids[1] - 1, ids[2] - 1
    expected = "three layer ids (input of layer k, 1 or more)"
    raise fault("drafter config", where=f"{path}, {LAYERS}", expected=expected, found=found, fix=fix)


def _refuse(what: str, path: Path, key: str, expected: object, found: object) -> None:
    if found != expected:
        fix = "Only EAGLE-3 drafters with one Llama layer are supported."
        raise fault(what, where=f"{path}, {key}", expected=expected, found=found, fix=fix)
