"""`ray-eagle drafter convert`: the same drafter in another tool's format, and back without a bit lost."""

import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ray_eagle.drafter import convert as convert_module
from ray_eagle.drafter.checkpoint import load_drafter, read_shape
from ray_eagle.drafter.convert import CHUNK, convert
from ray_eagle.drafter.engines import parse_engine
from ray_eagle.drafter.files import WEIGHTS
from ray_eagle.drafter.show import describe
from ray_eagle.drafter.variant import read_variant
from ray_eagle.errors import CheckpointError, ConfigError, EagleError, InputError
from ray_eagle.preflight.drafter import check_folder
from ray_eagle.target.sizes import read_target
from tests.drafters import (
    AQ_MEDAI,
    Damage,
    edit,
    kimi_config,
    llama_config,
    rename,
    retensor,
    sparse_drafter,
    tiny_folder,
)
from tests.tiny import VOCAB
from tests.unit.test_checkpoint import TENSORS
from tests.unit.test_drafter_check import both, split
from tests.unit.test_rotary import ROPES


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same_tensors(one: Path, other: Path) -> bool:
    first, second = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_to_speculators_and_back_is_the_same_bit_for_bit(
    tmp_path: Path, target_folder: Path, rope: dict[str, Any], dtype: torch.dtype
) -> None:
    extra = edit(bos_token_id=7, eagle_config__use_last_layernorm=True)
    ours = tiny_folder(tmp_path / "ours", extra, rope_parameters=rope, dtype=dtype)
    for name, target in (("alone", None), ("with embedding", read_target(target_folder))):
        there, back = tmp_path / name / "there", tmp_path / name / "back"
        convert(ours, there, "speculators", target=target)
        names = {key.replace("midlayer.", "layers.0.") for key in TENSORS}
        assert load_file(there / WEIGHTS).keys() == names | ({"embed_tokens.weight"} if target else set())
        assert config_of(there)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        assert config_of(there)["transformer_layer_config"]["rope_parameters"] == rope
        convert(there, back, "sglang")
        assert same_tensors(ours, back)
        again = config_of(back)
        assert again.pop("converted_from")["speculators_model_type"] == "eagle3"
        assert again == config_of(ours)
        assert read_shape(there) == read_shape(back) == read_shape(ours)


def test_what_only_speculators_knows_survives_the_way_through_sglangs_format(
    tmp_path: Path, target_folder: Path
) -> None:
    convert(tiny_folder(tmp_path / "ours"), tmp_path / "one", "speculators", target=read_target(target_folder))
    edit(speculators_config__default_proposal_method="mine", my_note="kept")(tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "two", "sglang")
    convert(tmp_path / "two", tmp_path / "three", "speculators")
    one, three = config_of(tmp_path / "one"), config_of(tmp_path / "three")
    assert one["transformer_layer_config"].pop("ray_eagle_embedding")
    assert three == one
    assert three["speculators_config"]["verifier"]["name_or_path"] == str(target_folder)


def test_the_verifier_is_named_by_its_whole_path(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(target_folder.parent)
    target = read_target(Path(target_folder.name))
    convert(tiny_folder(tmp_path / "ours"), tmp_path / "one", "speculators", target=target)
    assert config_of(tmp_path / "one")["speculators_config"]["verifier"]["name_or_path"] == str(target_folder)


def prefixed(name: str) -> str:
    return f"model.{name.replace('midlayer.', 'layers.0.')}"


FC_NORM = retensor(lambda t: t.update({f"fc_norm.{i}.weight": torch.rand(32) for i in range(3)}))
INPUT_NORM = retensor(lambda t: t.update({"input_norm.weight": torch.rand(96)}))
EMBEDDING = retensor(lambda t: t.update({"embed_tokens.weight": torch.rand(VOCAB, 32)}))
VARIANTS: dict[str, tuple[tuple[Damage, ...], frozenset[str]]] = {
    "model.layers.0": ((rename(prefixed),), frozenset()),
    "no t2d": ((retensor(lambda t: t.pop("t2d")),), frozenset()),
    "a copy of the embedding": ((EMBEDDING,), frozenset()),
    "two files": ((split,), frozenset()),
    "fc_norm": ((FC_NORM, edit(fc_norm=True)), frozenset({"fc_norm"})),
    "fc_norm as SGLang called it first": (
        (
            FC_NORM,
            edit(use_aux_norm=True),
            rename(
                lambda n: {
                    f"fc_norm.{i}.weight": f"aux_norm_{w}.weight" for i, w in enumerate(("low", "mid", "high"))
                }.get(n, n)
            ),
        ),
        frozenset({"fc_norm"}),
    ),
    "norm_before_fc": ((INPUT_NORM, edit(norm_before_fc=True)), frozenset({"norm_before_fc"})),
    "norm_output": ((edit(norm_output=True),), frozenset({"norm_output"})),
    "norm_before_residual": ((edit(eagle_config__norm_before_residual=True),), frozenset({"norm_before_residual"})),
    "a wider target": (
        (
            edit(target_hidden_size=64),
            retensor(lambda t: t.update({"fc.weight": torch.rand(32, 192)})),
        ),
        frozenset(),
    ),
    "an embedding of its own": ((EMBEDDING, edit(embed_requires_grad=True)), frozenset()),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_all_tools_are_shown_and_converted_both_ways(tmp_path: Path, name: str) -> None:
    changes, options = VARIANTS[name]
    source = tiny_folder(tmp_path / "source", *changes)
    plain, there, back = tmp_path / "plain", tmp_path / "there", tmp_path / "back"
    convert(source, plain, "sglang")
    convert(source, there, "speculators")
    convert(there, back, "sglang")
    assert same_tensors(plain, back)
    described = describe(source)
    assert described.variant and described.variant.options == options
    for folder in (plain, there, back):
        variant = read_variant(folder)
        assert (variant.options, variant.shape) == (options, described.variant.shape)
        assert variant.tensors().keys() <= {
            key.replace("layers.0.", "midlayer.") for key in load_file(folder / WEIGHTS)
        }
    trainable = described.problem == ""
    assert trainable == (described.variant.untrainable() is None)
    if trainable:
        first, second = load_drafter(source).state_dict(), load_drafter(back).state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)
    else:
        for folder in (source, plain, there, back):
            with pytest.raises(CheckpointError, match="`check` and `convert` work on it"):
                load_drafter(folder)


def test_the_whole_vocabulary_needs_no_map_in_any_format(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "a", retensor(lambda t: (t.pop("d2t"), t.pop("t2d"))), draft_vocab=VOCAB)
    convert(source, tmp_path / "b", "speculators")
    convert(tmp_path / "b", tmp_path / "c", "sglang")
    assert same_tensors(source, tmp_path / "c")
    assert load_drafter(tmp_path / "c").target_ids.tolist() == list(range(VOCAB))

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"][0], tensors["d2t"][1] = 1, -1

    reordered = tiny_folder(tmp_path / "d", retensor(swap), draft_vocab=VOCAB)
    with pytest.raises(InputError, match="reorders the whole vocabulary"):
        convert(reordered, tmp_path / "e", "speculators")
    convert(reordered, tmp_path / "f", "sglang")


def test_a_release_that_nobody_here_read_is_told_as_check_tells_it(tmp_path: Path) -> None:
    source, target = tiny_folder(tmp_path / "source"), read_target(llama_config(tmp_path / "target"))
    engine = parse_engine("sglang==9.9.9")
    (note,) = convert(source, tmp_path / "to", "sglang", engine=engine, target=target).notes
    (warning,) = [f for f in check_folder(tmp_path / "to", target, engine) if f.level == "warning"]
    assert note == f"{warning.message} {warning.fix}"
    assert note.startswith("sglang 9.9.9 is not known here, and taken for 0.5.23, the newest known. Measure: ")


@pytest.mark.parametrize(
    ("outputs", "model_type", "layers", "engine", "written"),
    [
        ([2, 3, 5], "llama", 8, "sglang==0.5.23", [2, 3, 5]),
        ([2, 3, 5], "llama", 8, "vllm", [3, 4, 6]),
        ([2, 3, 5], "kimi_k25", 8, "sglang==0.5.10", [2, 3, 5]),
        ([2, 3, 5], "kimi_k25", 8, "sglang==0.5.23", [3, 4, 6]),
        ([2, 3, 5], "deepseek_v3", 8, "sglang", [3, 4, 6]),
        ([1, 3, 5], "deepseek_v3", 8, "sglang==0.5.23", [1, 3, 5]),
        ([0, 3, 5], "deepseek_v3", 8, "sglang==0.5.23", None),  # its first id would be 1: read as outputs
        ([0, 3, 5], "deepseek_v3", 8, "vllm", [1, 4, 6]),
        ([2, 3, 7], "gpt_oss", 8, "sglang==0.5.23", [2, 3, 7]),
        ([2, 3, 5], "kimi_k25", 8, "reference", [2, 3, 5]),
    ],
)
def test_layer_ids_are_written_as_the_named_engine_reads_them(
    tmp_path: Path, outputs: list[int], model_type: str, layers: int, engine: str, written: list[int] | None
) -> None:
    source = tiny_folder(tmp_path / "source", edit(**both(outputs)))
    target = read_target(llama_config(tmp_path / "target", model_type=model_type, num_hidden_layers=layers))
    named = parse_engine(engine)
    if written is None:
        with pytest.raises(InputError, match="expected ids that mean the outputs"):
            convert(source, tmp_path / "to", "sglang", engine=named, target=target)
        return
    made = convert(source, tmp_path / "to", "sglang", engine=named, target=target)
    assert made.written_ids == tuple(written)
    config = config_of(tmp_path / "to")
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written
    assert config["eagle_aux_hidden_state_layer_ids"] == written
    assert named.reading(written, layers, model_type) == outputs
    assert list(read_shape(tmp_path / "to").aux_layers) == outputs  # here they mean what they meant
    convert(tmp_path / "to", tmp_path / "back", "sglang")
    assert config_of(tmp_path / "back") == config_of(source)
    edit(**both([1, 2, 3]))(tmp_path / "to")  # by hand: then they say what they say
    assert read_shape(tmp_path / "to").aux_layers == (1, 2, 3)


def test_layer_ids_that_the_config_lacks_come_from_the_target_or_from_the_caller(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", edit(eagle_config=None, eagle_aux_hidden_state_layer_ids=None))
    assert describe(source).outputs is None
    with pytest.raises(CheckpointError, match="expected three layer ids"):
        convert(source, tmp_path / "a", "sglang")
    target = read_target(llama_config(tmp_path / "target", num_hidden_layers=32))
    assert convert(source, tmp_path / "a", "sglang", target=target).outputs == (1, 15, 28)
    assert convert(source, tmp_path / "b", "sglang", outputs=(2, 16, 30)).outputs == (2, 16, 30)
    assert read_shape(tmp_path / "a").aux_layers == (1, 15, 28)
    assert read_shape(tmp_path / "b").aux_layers == (2, 16, 30)


def test_what_cannot_be_converted_leaves_nothing_behind(tmp_path: Path) -> None:
    good = tiny_folder(tmp_path / "good")
    damaged = tiny_folder(tmp_path / "damaged", retensor(lambda t: t.pop("lm_head.weight")))
    latent = tiny_folder(tmp_path / "latent", edit(architectures=["Eagle3DeepseekV2ForCausalLM"]))
    twice = {"eagle_aux_hidden_state_layer_ids": [1, 3, 3]}
    misread = tiny_folder(tmp_path / "misread", edit(eagle_config=twice, **twice))
    other = read_target(llama_config(tmp_path / "target", vocab_size=320))
    refusals: list[tuple[type[EagleError], str, Any]] = [
        (CheckpointError, "missing", lambda to: convert(damaged, to, "sglang")),
        (CheckpointError, "kv_lora_rank", lambda to: convert(latent, to, "sglang")),
        (
            CheckpointError,
            r"three distinct ids, ascending, found \[1, 3, 3\]",
            lambda to: convert(misread, to, "sglang"),
        ),
        (CheckpointError, "another target: vocab_size", lambda to: convert(good, to, "sglang", target=other)),
        (ConfigError, "--to sglang", lambda to: convert(good, to, "speculators", engine=parse_engine("sglang"))),
        (ConfigError, "--target", lambda to: convert(good, to, "sglang", engine=parse_engine("sglang"))),
    ]
    for kind, words, run in refusals:
        with pytest.raises(kind, match=words):
            run(tmp_path / "to")
        assert not (tmp_path / "to").exists()
    with pytest.raises(InputError, match="expected no folder, or an empty one"):
        convert(good, damaged, "sglang")
    assert describe(latent).problem and "latent attention" in describe(latent).family


@pytest.mark.parametrize("error", [errno.EXDEV, errno.ENOSYS])
def test_where_the_kernel_cannot_copy_the_file_is_the_same(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_folder(tmp_path / "source")
    convert(source, tmp_path / "inside", "speculators")
    asked: list[int] = []

    def refuse(*_: Any) -> int:
        asked.append(error)
        raise OSError(error, "cannot")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    convert(source, tmp_path / "through", "speculators")
    assert asked and (tmp_path / "inside" / WEIGHTS).read_bytes() == (tmp_path / "through" / WEIGHTS).read_bytes()
    monkeypatch.setattr(convert_module, "CHUNK", 1000)
    convert(source, tmp_path / "pieces", "speculators")
    assert (tmp_path / "inside" / WEIGHTS).read_bytes() == (tmp_path / "pieces" / WEIGHTS).read_bytes()


def test_a_large_one_is_converted_in_bounded_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 3584, "intermediate_size": 4096, "draft_vocab_size": 2000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    source = sparse_drafter(tmp_path / "source", AQ_MEDAI.model_copy(update=sizes | heads))
    tracemalloc.start()
    target = read_target(kimi_config(tmp_path / "target", hidden_size=3584))
    made = convert(source, tmp_path / "to", "sglang", engine=parse_engine("sglang==0.5.23"), target=target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.written_ids == (3, 31, 59)
    assert made.bytes > 200_000_000
    assert peak < 3 * CHUNK
    assert describe(tmp_path / "to").problem == ""
