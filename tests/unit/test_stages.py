"""A target in stages: the same bits as in one piece, only its own tensors read, a clear error for all that is missing."""

import json
import random
import re
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)

from ray_eagle.config import TargetConfig
from ray_eagle.errors import TargetError
from ray_eagle.target.capture import Stage, StageOutput, TokenPack
from ray_eagle.target.loading import TargetFacts, read_facts
from ray_eagle.target.parts import drop_beside
from ray_eagle.target.split import active_share, layer_costs, split_layers
from ray_eagle.target.stage import load_stage
from ray_eagle.target.tensors import INDEX, layer_of, open_tensors, tensor_files
from tests.random_data import random_tokens
from tests.tiny import SHAPE, VOCAB, tiny_deepseek_v3, tiny_qwen3_moe, tiny_target

CPU = torch.device("cpu")
FAMILIES = [tiny_target, tiny_qwen3_moe, tiny_deepseek_v3]


def facts_of(folder: Path, **settings: Any) -> tuple[TargetFacts, TargetConfig]:
    config = TargetConfig(path=str(folder), dtype="float32", **settings)
    return read_facts(config), config


def random_pack(seed: int) -> TokenPack:
    generator = torch.Generator().manual_seed(seed)
    return TokenPack.of([([3], [0]), *(random_tokens(generator, VOCAB, 50) for _ in range(5)), ([1, 2], [0, 0])])


def run_all(stages: list[Stage], pack: TokenPack) -> tuple[StageOutput, dict[int, torch.Tensor]]:
    """The last stage's output, and the aux states of all."""
    hidden, aux = None, {}
    for stage in stages:
        output = stage.run(pack, hidden)
        hidden = output.hidden_TH
        aux |= output.aux
    assert hidden is None
    return output, aux


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_stage_equals_two_equals_four(tmp_path: Path, family: Callable[..., Path], tie: bool, shard: str) -> None:
    """Bit for bit: the same operations on the same numbers."""
    folder = family(tmp_path / "t", tie=tie, shard=shard)
    assert (folder / INDEX).exists() == (shard == "20KB")
    facts, config = facts_of(folder)
    pack = random_pack(0)
    whole, whole_aux = run_all([load_stage(facts, config, CPU)], pack)
    assert set(whole_aux) == set(facts.aux_layers)
    for count in (2, 4):
        ranges = split_layers(layer_costs(facts), count)
        split, aux = run_all([load_stage(facts, config, CPU, layers) for layers in ranges], pack)
        assert set(aux) == set(whole_aux) and all(torch.equal(aux[i], whole_aux[i]) for i in aux)
        for name in ("last_SH", "top1_S", "lse_S"):
            assert torch.equal(getattr(split, name), getattr(whole, name))
    assert whole.top1_S is not None and whole.top1_S.dtype == torch.int32 and len(whole.top1_S) == sum(pack.teaching)
    assert whole.lse_S is not None and whole.lse_S.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_holds_and_reads_only_its_own_tensors(tmp_path: Path, family: Callable[..., Path]) -> None:
    """Files without a tensor of the stage may be gone, and of a file's other tensors nothing is in memory."""
    folder = family(tmp_path / "t", shard="8KB")
    facts, config = facts_of(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = model.state_dict()
    files = tensor_files(folder)
    kept = {file: file.read_bytes() for file in set(files.values())}
    for layers in (range(2), range(2, 5), range(5, 8)):
        first, last = layers.start == 0, layers.stop == 8
        own = {
            name
            for name in state
            if (layer_of(name) in layers)
            or (first and "embed_tokens" in name)
            or (last and re.search(r"lm_head|model\.norm", name))
        }
        needed = {
            file
            for name, file in files.items()
            if layer_of(name) in layers or name in own  # experts are fused in memory, single in the files
        }
        assert 0 < len(needed) < len(kept)
        for file in kept.keys() - needed:
            file.unlink()
        stage = load_stage(facts, config, CPU, layers)
        tensors = dict(stage.parts.decoder.state_dict(prefix="model."))
        tensors |= dict(stage.parts.head.state_dict(prefix="lm_head."))
        assert set(tensors) == own and all(torch.equal(tensors[name], state[name]) for name in own)
        assert not any(t.is_meta for t in [*stage.parts.decoder.parameters(), *stage.parts.decoder.buffers()])
        for file, content in kept.items():
            file.write_bytes(content)


def test_the_whole_and_a_wrong_range(target_folder: Path) -> None:
    facts, config = facts_of(target_folder)
    stage = load_stage(facts, config, CPU)
    assert stage.layers == range(8) and stage.first and stage.last
    for wrong in (range(9), range(3, 3), range(0, 8, 2), range(-1, 2)):
        with pytest.raises(TargetError, match="expected contiguous layers from 0 to 7"):
            load_stage(facts, config, CPU, wrong)


def test_hidden_states_go_to_later_stages_only(target_folder: Path) -> None:
    facts, config = facts_of(target_folder)
    pack = random_pack(1)
    first, second = (load_stage(facts, config, CPU, layers) for layers in (range(4), range(4, 8)))
    hidden = first.run(pack).hidden_TH
    assert hidden is not None and hidden.shape == (len(pack.ids_T), 32)
    with pytest.raises(TargetError, match=r"layers 0-3: expected no hidden states, since it is the first"):
        first.run(pack, hidden)
    with pytest.raises(TargetError, match=r"layers 4-7: expected the hidden states of the stage before"):
        second.run(pack)


def test_a_truncated_checkpoint_names_what_is_missing(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    lost = {"model.layers.5.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"}
    save_file({n: t for n, t in tensors.items() if n not in lost}, folder / "model.safetensors", {"format": "pt"})
    facts, config = facts_of(folder)
    load_stage(facts, config, CPU, range(5))
    with pytest.raises(TargetError, match=r"missing model\.layers\.5\.mlp\.up_proj\.weight"):
        load_stage(facts, config, CPU, range(4, 6))
    with pytest.raises(TargetError, match=r"missing lm_head\.weight, model\.norm\.weight\. "):
        load_stage(facts, config, CPU, range(6, 8))
    with pytest.raises(
        TargetError, match=r"missing lm_head\.weight, model\.layers\.5\.mlp\.up_proj\.weight, model\.norm"
    ):
        load_stage(facts, config, CPU)


def test_a_missing_expert_is_no_random_expert(tmp_path: Path) -> None:
    folder = tiny_qwen3_moe(tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.5.mlp.experts.3.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    facts, config = facts_of(folder)
    with pytest.raises(TargetError, match=r"layers\.5\.mlp\.experts\.down_proj"):
        load_stage(facts, config, CPU, range(4, 8))


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.5.mlp.up_proj.weight"] = torch.zeros(7, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    facts, config = facts_of(folder)
    with pytest.raises(
        TargetError, match=r"found model\.layers\.5\.mlp\.up_proj\.weight \(7, 32\) instead of \(64, 32\)"
    ):
        load_stage(facts, config, CPU)


@pytest.mark.parametrize("shard", ["1GB", "8KB"])
@pytest.mark.parametrize("cut", [0, 5, 1000, -1])
def test_a_file_cut_short_is_named(tmp_path: Path, shard: str, cut: int) -> None:
    folder = tiny_target(tmp_path / "t", shard=shard)
    file = tensor_files(folder)["model.layers.6.mlp.up_proj.weight"]
    facts, config = facts_of(folder)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(TargetError, match=rf"target weights: {file}: expected .* found .* The file is damaged"):
        load_stage(facts, config, CPU, range(6, 8))
    with pytest.raises(TargetError, match=rf"{file}"):
        layer_costs(facts)
    if shard == "8KB":
        load_stage(facts, config, CPU, range(2))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "t", shard="8KB")
    file = tensor_files(folder)["model.layers.6.mlp.up_proj.weight"]
    facts, config = facts_of(folder)
    file.unlink()
    with pytest.raises(TargetError, match=rf"{file}: expected a file, found nothing"):
        load_stage(facts, config, CPU)


def test_an_index_that_lies_or_is_damaged_is_named(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "t", shard="8KB")
    facts, config = facts_of(folder)
    index = json.loads((folder / INDEX).read_text())
    one, other = "model.layers.0.mlp.up_proj.weight", "model.layers.7.mlp.up_proj.weight"
    index["weight_map"][one] = index["weight_map"][other]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(TargetError, match=rf"{index['weight_map'][other]}: expected the tensor {re.escape(one)}"):
        load_stage(facts, config, CPU)
    for wrong in ("{", "[]", "{}", '{"weight_map": 3}'):
        (folder / INDEX).write_text(wrong)
        with pytest.raises(TargetError, match=r"index\.json is not a safetensors index"):
            load_stage(facts, config, CPU)
    (folder / INDEX).unlink()
    with pytest.raises(TargetError, match=r"expected model\.safetensors or .*, found neither"):
        load_stage(facts, config, CPU)


def test_a_family_whose_packed_samples_see_each_other_is_refused(tmp_path: Path) -> None:
    """gpt-oss gives its masks no positions: transformers' own attention then takes a pack for one text."""
    torch.manual_seed(0)
    shape = SHAPE | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    GptOssForCausalLM(GptOssConfig(**shape, sliding_window=8)).save_pretrained(tmp_path)
    facts, config = facts_of(tmp_path, attention="eager")
    for layers in (None, range(1), range(4, 6)):
        with pytest.raises(TargetError, match=r"\(gpt_oss\): packed samples see each other"):
            load_stage(facts, config, CPU, layers)


@pytest.mark.parametrize("seed", range(30))
def test_the_split_equals_trying_every_one(seed: int) -> None:
    pick = random.Random(seed)
    costs = [pick.choice([0.0, 1.0, pick.random(), 10 * pick.random()]) for _ in range(pick.randint(1, 9))]
    for stages in range(1, len(costs) + 1):
        ranges = split_layers(costs, stages)
        assert [i for r in ranges for i in r] == list(range(len(costs))) and all(ranges) and len(ranges) == stages
        every = [[0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), stages - 1)]
        best = min(max(sum(costs[a:b]) for a, b in pairwise(c)) for c in every)
        assert max(sum(costs[i] for i in r) for r in ranges) == pytest.approx(best)


def test_more_stages_than_layers_are_refused() -> None:
    for stages in (0, 4):
        with pytest.raises(TargetError, match=rf"3 layers cannot be split into {stages} stages: use 1 to 3"):
            split_layers([1.0, 1.0, 1.0], stages)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_costs_equal_the_active_weights_of_the_loaded_model(
    tmp_path: Path, family: Callable[..., Path], shard: str
) -> None:
    facts, _ = facts_of(family(tmp_path / "t", shard=shard))
    model = AutoModelForCausalLM.from_pretrained(facts.path)
    expected = []
    for layer in model.model.layers:
        total = sum(t.numel() for t in layer.state_dict().values())
        experts = getattr(layer.mlp, "experts", None)
        idle = 0 if experts is None else sum(p.numel() for p in experts.parameters()) * 6 / 8
        expected.append(total - idle)
    expected[-1] += model.lm_head.weight.numel()
    assert layer_costs(facts) == pytest.approx(expected)


def test_which_tensors_and_experts_count() -> None:
    assert layer_of("model.layers.12.mlp.up_proj.weight") == 12
    assert layer_of("language_model.model.layers.3.self_attn.o_proj.weight") == 3
    assert layer_of("vision_tower.encoder.layers.3.norm.weight") is None
    assert layer_of("model.visual.layers.3.norm.weight") is None and layer_of("lm_head.weight") is None
    assert active_share({"n_routed_experts": 384, "num_experts_per_tok": 8}) == pytest.approx(8 / 384)
    assert active_share({"num_local_experts": 8, "num_experts_per_tok": 2}) == 0.25
    assert active_share({"hidden_size": 8}) == 1.0


def test_towers_beside_the_language_model_are_dropped() -> None:
    model = nn.Module()
    model.tower, model.inner = nn.Linear(2, 2), nn.Module()
    model.inner.decoder, model.inner.bridge = nn.Sequential(nn.Linear(2, 2)), nn.Linear(3, 3)
    model.head = nn.Linear(2, 4)
    drop_beside(model, (model.inner.decoder, model.head))
    assert sorted(model.state_dict()) == ["head.bias", "head.weight", "inner.decoder.0.bias", "inner.decoder.0.weight"]


def test_opened_tensors_are_read_when_they_are_indexed(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "t", shard="20KB")
    files = tensor_files(folder)
    slices = open_tensors(files, files)
    whole = {name: tensor for file in set(files.values()) for name, tensor in load_file(file).items()}
    assert set(slices) == set(whole) and all(torch.equal(slices[name][...], whole[name]) for name in whole)
