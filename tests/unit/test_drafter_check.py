"""`ray-eagle drafter check`: one damaged or mismatched drafter a pitfall, each named; none of the good ones alarms."""

import json
import os
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ray_eagle.drafter.convert import convert
from ray_eagle.drafter.engines import NEWEST, parse_engine
from ray_eagle.drafter.files import INDEX, WEIGHTS
from ray_eagle.drafter.show import describe
from ray_eagle.errors import ConfigError
from ray_eagle.preflight.drafter import check_folder, passed
from ray_eagle.preflight.report import Finding
from ray_eagle.serving.versions import RELEASES
from ray_eagle.target.sizes import read_target
from tests.drafters import AQ_MEDAI, edit, kimi_config, llama_config, rename, retensor, sparse_drafter, tiny_folder
from tests.tiny import VOCAB
from tests.unit.test_rotary import BETAS, LLAMA3, ROPES

D = 128
NEW, OLD, VLLM = f"sglang=={NEWEST}", "sglang==0.5.10", "vllm"
ids = "eagle_aux_hidden_state_layer_ids"


def both(values: list[int]) -> dict[str, Any]:
    return {f"eagle_config__{ids}": values, ids: values}


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2380000000\n")


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 100)


def header_lies(folder: Path) -> None:
    """The header says a shorter d2t at the same shape: the bytes of the next tensor would be read."""
    data = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["d2t"]["data_offsets"][1] -= 8
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def split(folder: Path) -> None:
    """Two files and an index, as large checkpoints come."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, folder / file)
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (folder / INDEX).write_text(json.dumps(index))


def half_lost(folder: Path) -> None:
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def absolute(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] += torch.arange(D)


SCALED = edit(rope_parameters=LLAMA3, rope_theta=LLAMA3["rope_theta"], rope_scaling={**LLAMA3, "rope_theta": None})
# name: (changes, target, engine, level, words of one finding)
Fault = tuple[Any, dict[str, Any], str | None, str, str]
FAULTS: dict[str, Fault] = {
    # files
    "no config": (lambda f: (f / "config.json").unlink(), {}, None, "error", "expected config.json, found nothing"),
    "config cut": (lambda f: (f / "config.json").write_text('{"a'), {}, None, "error", "is not valid JSON"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), {}, None, "error", "expected a safetensors file, found nothing"),
    "pickled weights": (pickled, {}, None, "error", "found pytorch_model.bin"),
    "LFS pointer": (pointer, {}, None, "error", "found a Git LFS pointer"),
    "cut copy": (cut, {}, None, "error", "truncated safetensors"),
    "lying header": (header_lies, {}, None, "error", "d2t in the safetensors header: "),
    "a file of the index lost": (half_lost, {}, None, "error", "00002.safetensors: expected a safetensors file, found no"),
    # another kind of model
    "a plain Llama": (edit(architectures=["LlamaForCausalLM"]), {}, None, "error", "found LlamaForCausalLM"),
    "EAGLE 1 named for EAGLE3": (edit(architectures=["LlamaForCausalLMEagle"]), {}, None, "error", "LMEagle"),
    "MLA in name alone": (edit(architectures=["Eagle3DeepseekV2ForCausalLM"]), {}, None, "error", "the key 'kv_lora_rank'"),
    "two layers": (edit(num_hidden_layers=2), {}, None, "error", "num_hidden_layers: expected 1, found 2"),
    # tensors
    "no lm_head: a random head": (retensor(lambda t: t.pop("lm_head.weight")), {}, None, "error", "missing ['lm_head.we"),
    "no fc": (retensor(lambda t: t.pop("fc.weight")), {}, None, "error", "missing ['fc.weight']"),
    "an unknown name": (retensor(lambda t: t.update(x=torch.ones(1))), {}, None, "error", "unknown ['x']"),
    "a tensor under two names": (
        retensor(lambda t: t.update({"model.fc.weight": t["fc.weight"].clone()})), {}, None, "error",
        "more than once ['model.fc.weight']",
    ),
    "names of both tools": (
        retensor(lambda t: t.update({"layers.0.hidden_norm.weight": t.pop("midlayer.hidden_norm.weight")})), {}, None,
        "error", "unknown ['layers.0.hidden_norm.weight']",
    ),
    "fc of two states": (
        retensor(lambda t: t.update({"fc.weight": torch.zeros(32, 64)})), {}, None, "error",
        "shape of fc.weight: |expected [32, 96], found [32, 64]",
    ),
    "head of another vocabulary": (edit(draft_vocab_size=64), {}, None, "error", "shape of lm_head.weight: |expected [64"),
    "quantised weights": (
        retensor(lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)})), {}, None, "error",
        "dtype of fc.weight|found F8_E4M3",
    ),
    "fc_norm lost from the config": (
        retensor(lambda t: t.update({f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)})), {}, None, "error",
        "unknown ['fc_norm.0.weight'",
    ),
    "fc_norm without its weights": (edit(fc_norm=True), {}, None, "error", "missing ['fc_norm.0.weight'"),
    "query norms of Qwen3": (
        retensor(lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)})), {}, None, "error",
        "unknown ['midlayer.self_attn.q_norm.weight']",
    ),
    # the vocabulary map
    "absolute ids": (retensor(absolute), {}, None, "error", "expected d2t as offsets"),
    "maps that disagree": (retensor(lambda t: t.update(t2d=t["t2d"].roll(1))), {}, None, "error", "two maps that disag"),
    "one id twice, no t2d": (
        retensor(lambda t: (t.pop("t2d"), t["d2t"].__setitem__(1, int(t["d2t"][0]) - 1))), {}, None, "error",
        "1 ids more than once",
    ),
    "no map, trimmed": (retensor(lambda t: (t.pop("t2d"), t.pop("d2t"))), {}, None, "error", "missing ['d2t', 't2d']"),
    # config
    "heads that cannot be shared": (edit(num_attention_heads=3), {}, None, "error", "3 attention heads cannot share 2"),
    "tied embeddings": (edit(tie_word_embeddings=True), {}, None, "error", "tie_word_embeddings is true"),
    "the target's quantisation": (edit(quantization_config={"bits": 4}), {}, None, "error", "quantization_config is set"),
    "no draft_vocab_size": (edit(draft_vocab_size=None), {}, None, "error", "shape of lm_head.weight: |expected [261"),
    "a draft vocabulary beyond the target's": (edit(draft_vocab_size=300), {}, None, "error", "300 is larger than vocab"),
    "another activation": (edit(hidden_act="gelu"), {}, None, "error", "hidden_act: expected silu, found gelu"),
    "biases that are not there": (edit(attention_bias=True), {}, None, "error", "attention_bias: expected False, found True"),
    "a size in quotes": (edit(hidden_size="32"), {}, None, "error", "hidden_size: expected an integer above 0, found '32'"),
    "a needed key": (edit(hidden_size=None), {}, None, "error", "expected the key 'hidden_size'"),
    # layer ids
    "ids twice": (edit(**both([1, 3, 3])), {}, None, "error", "[1, 3, 3]: expected three distinct ids"),
    "ids not ascending": (edit(**both([4, 3, 1])), {}, None, "error", "layer ids [4, 3, 1]: expected three distinct"),
    "two ids": (edit(**both([1, 3])), {}, None, "error", "expected three layer ids"),
    "ids beyond the target": (edit(**both([1, 3, 8])), {}, None, "error", "expected below 8 (the target's layers)"),
    "two copies of the ids": (edit(**{ids: [1, 2, 4]}), {}, None, "error", "is [1, 2, 4], but [1, 3, 4] in eagle_config"),
    "no ids": (edit(eagle_config=None, **{ids: None}), {}, None, "warning", "no layer ids in the config: |[1, 3, 4]"),
    "no ids, a shallow target": (
        edit(eagle_config=None, **{ids: None}), {"num_hidden_layers": 6}, None, "error", "has no default ids",
    ),
    "ids read two ways": (
        edit(**both([2, 3, 5])), {"model_type": "deepseek_v3"}, None, "warning",
        "SGLang since 2026-05 takes the outputs of [1, 2, 4]",
    ),
    "ids read as inputs by this SGLang": (
        edit(**both([2, 3, 5])), {"model_type": "kimi_k25"}, NEW, "error", "reads [2, 3, 5] on kimi_k25|outputs of [1, 2, 4]",
    ),
    "ids read as inputs by vLLM": (lambda f: None, {}, VLLM, "error", "vllm reads [1, 3, 4] on llama as the outputs of [0, 2"),
    # RoPE
    "two bases": (edit(rope_theta=1e6), {}, None, "error", "rope_theta is 1000000.0, but 10000.0 in rope_parameters"),
    "two kinds": (
        edit(rope_parameters=LLAMA3, rope_theta=500000.0, rope_scaling={"rope_type": "yarn", "factor": 4.0}), {}, None,
        "error", "rope_scaling says yarn, rope_parameters llama3",
    ),
    "the base where transformers 4 does not look": (
        edit(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_theta=None), {}, None, "warning",
        "stands in rope_parameters alone",
    ),
    "no base": (
        edit(rope_parameters=None, rope_theta=None),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, None, "warning",
        "no RoPE base: engines take 10000, where the target has 1000000.0",
    ),
    "a kind that nobody knows": (edit(rope_parameters__rope_type="spiral"), {}, None, "error", "rope_type spiral"),
    "half of a kind": (
        edit(rope_parameters={"rope_type": "llama3", "factor": 8.0}, rope_theta=10000.0), {}, None, "error",
        "RoPE llama3 needs low_freq_factor, high_freq_factor, original_max_position_embeddings",
    ),
    # the target
    "another hidden size": (lambda f: None, {"hidden_size": 64}, None, "error", "hidden_size: |expected 64 (the target's)"),
    "states of another width": (
        lambda f: [
            d(f)
            for d in (
                edit(target_hidden_size=64),
                retensor(lambda t: t.update({"fc.weight": torch.zeros(32, 192)})),
            )
        ],
        {}, None, "error", "hidden_size: |expected 32 (the target's), found 64",
    ),
    "another vocabulary": (lambda f: None, {"vocab_size": 320}, None, "error", "vocab_size: |expected 320 (the target's)"),
    "a short context": (
        edit(max_position_embeddings=256), {}, None, "warning", "max_position_embeddings is 256, the target's 512",
    ),
    # the engine
    "speculators' names in an old SGLang": (
        rename(lambda n: n.replace("midlayer.", "layers.0.")), {}, OLD, "error", "skips layers.0.* without a word",
    ),
    "a prefixed head": (rename(lambda n: f"model.{n}"), {}, NEW, "error", "skips model.lm_head.weight without a word"),
    "norm_before_residual": (
        edit(norm_before_residual=True), {}, NEW, "error", "norm_before_residual is on, which sglang 0.5.23 does not know",
    ),
    "SpecForge's norm_output": (edit(norm_output=True), {}, None, "warning", "SpecForge writes it and always feeds the un-n"),
    "no MLA on an MLA target": (lambda f: None, {"kv_lora_rank": 16}, NEW, "warning", "the target's attention backend"),
    "a release that nobody here read": (lambda f: None, {}, "sglang==9.9.9", "warning", "sglang 9.9.9 is not known|0.5.23"),
    "a quantised target": (lambda f: None, {"quantization_config": {"x": 1}}, NEW, "warning", "the target is quantised"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_pitfall_is_found_and_named(tmp_path: Path, name: str) -> None:
    damage, target, engine, level, words = FAULTS[name]
    folder = tiny_folder(tmp_path / "drafter")
    damage(folder)
    given = read_target(llama_config(tmp_path / "target", **target))
    findings = check_folder(folder, given, parse_engine(engine) if engine else None)
    found = [f for f in findings if f.level == level and all(part in f.message for part in words.split("|"))]
    assert found, findings
    assert found[0].fix or found[0].message.endswith(".")
    assert passed(findings) == (level == "warning")
    assert len(FAULTS) > 50


def alarms(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def aq_medai(folder: Path) -> Path:
    return sparse_drafter(folder, AQ_MEDAI)


YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 16.0, **BETAS}
DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 16}
GOOD: dict[str, tuple[Any, Any, str | None]] = {
    "ours": (tiny_folder, {}, None),
    "ours, for the reference engine": (tiny_folder, {}, "reference"),
    "float32, llama3": (lambda f: tiny_folder(f, dtype=torch.float32, rope_parameters=LLAMA3), {}, NEW),
    "float16, yarn": (lambda f: tiny_folder(f, dtype=torch.float16, rope_parameters=YARN), {}, NEW),
    "linear": (lambda f: tiny_folder(f, rope_parameters=ROPES["linear"]), {}, None),
    "old RoPE keys": (lambda f: tiny_folder(f, edit(rope_parameters=None)), {"model_type": "qwen3"}, NEW),
    "ModelOpt: no t2d": (lambda f: tiny_folder(f, retensor(lambda t: t.pop("t2d"))), {"model_type": "qwen3_moe"}, NEW),
    "TorchSpec: layers.0 in SGLang's config": (
        lambda f: tiny_folder(f, rename(lambda n: n.replace("midlayer.", "layers.0."))), {}, NEW,
    ),
    "model. before all but the head": (
        lambda f: tiny_folder(f, rename(lambda n: n if n.startswith("lm_head") else f"model.{n}")), {}, NEW,
    ),
    "a copy of the embedding": (
        lambda f: tiny_folder(f, retensor(lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCAB, 32)}))), {}, NEW,
    ),
    "the whole vocabulary, no maps": (
        lambda f: tiny_folder(f, retensor(lambda t: (t.pop("d2t"), t.pop("t2d"))), draft_vocab=VOCAB), {}, NEW,
    ),
    "EAGLE 3.1: fc_norm": (
        lambda f: tiny_folder(
            f, edit(fc_norm=True), retensor(lambda t: t.update({f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)}))
        ), {}, NEW,
    ),
    "narrower than its target": (
        lambda f: tiny_folder(
            f, edit(target_hidden_size=64), retensor(lambda t: t.update({"fc.weight": torch.zeros(32, 192)}))
        ), {"hidden_size": 64}, NEW,
    ),
    "two files and an index": (lambda f: tiny_folder(f, split), {}, None),
    "ids at the top level alone": (lambda f: tiny_folder(f, edit(**{f"eagle_config__{ids}": None})), {}, NEW),
    "ids in eagle_config alone": (lambda f: tiny_folder(f, edit(**{ids: None})), {}, NEW),
    "ids that DeepSeek's SGLang reads as outputs": (tiny_folder, DEEPSEEK, None),
    "true size, Kimi's nested config, an old SGLang's ids": (aq_medai, kimi_config, "reference"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_no_false_alarm(tmp_path: Path, name: str) -> None:
    make, target, engine = GOOD[name]
    folder = make(tmp_path / "drafter")
    given = target(tmp_path / "target") if callable(target) else llama_config(tmp_path / "target", **target)
    findings = check_folder(folder, read_target(given), parse_engine(engine) if engine else None)
    assert alarms(findings) == []
    assert "all tensors present" in findings[0].message


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_no_false_alarm_on_exports_for_speculators_and_vllm(tmp_path: Path, rope: dict[str, Any]) -> None:
    ours = tiny_folder(tmp_path / "ours", rope_parameters=rope)
    target = read_target(llama_config(tmp_path / "target", **DEEPSEEK))
    convert(ours, tmp_path / "speculators", "speculators")
    convert(ours, tmp_path / "vllm", "sglang", engine=parse_engine("vllm"), target=target)
    for folder, engine in (("speculators", None), ("speculators", "vllm"), ("vllm", "vllm")):
        assert alarms(check_folder(tmp_path / folder, target, parse_engine(engine) if engine else None)) == []
    (error,) = alarms(check_folder(tmp_path / "speculators", target, parse_engine("sglang==0.5.10")))[:1]
    assert "skips layers.0.*" in error.message


def test_speculators_format_is_an_error_for_sglang(tmp_path: Path) -> None:
    convert(tiny_folder(tmp_path / "ours"), tmp_path / "speculators", "speculators")
    target = read_target(llama_config(tmp_path / "target"))
    messages = [
        f.message for f in check_folder(tmp_path / "speculators", target, parse_engine(NEW)) if f.level == "error"
    ]
    assert any("SGLang does not look into transformer_layer_config" in message for message in messages)


def test_an_architecture_that_is_no_name_is_shown_as_a_problem(tmp_path: Path) -> None:
    shown = describe(tiny_folder(tmp_path, edit(architectures=[{}])))
    assert shown.family == "unknown (no architecture)" and "expected a list of one name, found [{}]" in shown.problem


def test_a_drafter_of_2_gigabytes_is_shown_and_checked_without_reading_it(tmp_path: Path) -> None:
    folder = aq_medai(tmp_path / "drafter")
    target = kimi_config(tmp_path / "target")
    size = (folder / WEIGHTS).stat().st_size
    assert size == pytest.approx(2.38e9, rel=0.01)

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before, faults, began = read(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.monotonic()
    shown = describe(folder)
    findings = check_folder(folder, read_target(target), parse_engine(NEW))
    seconds = time.monotonic() - began
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert (shown.variant and shown.variant.shape, shown.problem) == (AQ_MEDAI, "")
    assert size > shown.bytes > size - 10_000
    assert shown.parameters == pytest.approx(1.19e9, rel=0.01)
    assert (seconds < 2, read() - before < 2_000_000, faults < 20_000) == (True, True, True), (seconds, faults)
    messages = " ".join(finding.message for finding in alarms(findings))
    assert "sglang 0.5.23 reads [2, 30, 58] on kimi_k2 as the outputs of [1, 29, 57]" in messages
    assert "latent attention" in messages


@pytest.mark.parametrize("text", ["sglang=0.5.23", "tgi", "vllm=1", "sglang==0.5.12", "reference==1.0.0", ""])
def test_an_engine_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--engine"):
        parse_engine(text)


def test_the_newest_known_release_is_the_newest_that_is_served() -> None:
    assert list(RELEASES)[-1] == NEWEST and not parse_engine(NEW).caveat and not parse_engine("vllm==9.9.9").caveat
