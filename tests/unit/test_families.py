"""Every target family through capture, training and reference serving, against plain transformers."""

import json
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, GPTNeoXConfig, GPTNeoXForCausalLM

from ray_eagle.config import DrafterConfig, ServeConfig, TargetConfig
from ray_eagle.drafter.start import new_shape, start_drafter
from ray_eagle.errors import TargetError
from ray_eagle.hidden_states.plan import TokenSample, set_aside_unreadable
from ray_eagle.hidden_states.schema import Sample
from ray_eagle.serving.reference import load_engine
from ray_eagle.target.attention import PACKED, group_queries
from ray_eagle.target.capture import Stage, TokenPack
from ray_eagle.target.generation import Decoder, Request
from ray_eagle.target.loading import TargetFacts, head_and_embedding, load_tokenizer, read_facts
from ray_eagle.target.logits import LogitRule
from ray_eagle.target.stage import load_model, load_stage
from ray_eagle.target.tensors import OTHER_TOWERS, tensor_files
from ray_eagle.training.losses import Objective, entering_counts, loss_weights
from ray_eagle.training.packing import make_pack
from ray_eagle.training.unroll import Unroll, score_steps, train_pack
from ray_eagle.training.weights import Weights
from tests.families import FAMILIES, WINDOW
from tests.states import Samples, assert_same, capture_pack, plain_model, ragged_samples
from tests.tiny import VOCAB

CPU = torch.device("cpu")
NEW_TOKENS = 24
WHOLE_ONLY = {"granite"}
"""Families whose decoder scales its input outside the embedding."""
LOGITS = {"gemma2": LogitRule(cap=3.0), "cohere": LogitRule(0.25), "granite": LogitRule(1 / 3)}
TOWERED = ["kimi_k25", "gemma3"]


@dataclass(frozen=True)
class Case:
    """One family's model, loaded in both ways."""

    name: str
    config: TargetConfig
    facts: TargetFacts
    stage: Stage
    plain: Any

    @property
    def samples(self) -> Samples:
        return ragged_samples(3, longest=5 * WINDOW)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Half of the families in one file, half in many with an index."""
    shard = "20KB" if list(FAMILIES).index(request.param) % 2 else "1GB"
    folder = FAMILIES[request.param](tmp_path_factory.mktemp("family") / request.param, shard=shard)
    config = TargetConfig(path=str(folder), dtype="float32")
    facts = read_facts(config)
    plain = plain_model(folder, torch.float32)
    plain.generation_config = GenerationConfig()
    return Case(request.param, config, facts, load_stage(facts, config, CPU), plain)


def test_facts_are_read_from_the_config_alone(case: Case, tmp_path: Path) -> None:
    shutil.copy(case.facts.path / "config.json", tmp_path)
    facts = read_facts(TargetConfig(path=str(tmp_path)))
    assert facts == replace(case.facts, path=tmp_path, fingerprint=facts.fingerprint)
    text = case.plain.config.get_text_config()
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings"):
        assert getattr(facts, name) == getattr(text, name), name
    assert facts.layers == text.num_hidden_layers and facts.num_key_value_heads == text.num_key_value_heads
    rope = text.rope_parameters.get("full_attention", text.rope_parameters)
    assert facts.rope == rope
    assert facts.logits == LOGITS.get(case.name, LogitRule())


def test_packed_states_and_teacher_equal_each_sample_alone(case: Case) -> None:
    """Windows, sinks and soft-capped scores are part of the packed attention."""
    assert case.stage.parts.decoder.config._attn_implementation == PACKED
    assert case.stage.logits == case.facts.logits
    samples = case.samples
    assert max(len(ids) for ids, _ in samples) > 2 * WINDOW
    assert_same(case.plain, case.stage.parts, case.facts.aux_layers, samples, 2e-5, case.facts.logits)


def test_head_embedding_and_norm_by_key_are_the_models(case: Case) -> None:
    head, embedding, norm = head_and_embedding(case.facts)
    assert torch.equal(head, case.plain.get_output_embeddings().weight)
    assert torch.equal(embedding, case.plain.get_input_embeddings().weight)
    even = torch.tensor([1.0, -1.0]).repeat(16)[None]  # neither its mean nor its size is changed by a norm
    with torch.inference_mode():
        torch.testing.assert_close(case.plain.get_decoder().norm(even), even * norm, atol=1e-4, rtol=0)


def test_two_stages_equal_one_or_say_why_not(case: Case) -> None:
    if case.name in WHOLE_ONLY:
        for layers in (range(4), range(4, 8)):
            with pytest.raises(TargetError, match=rf"\({case.name}\): this family cannot be split into stages"):
                load_stage(case.facts, case.config, CPU, layers)
        return
    pack = TokenPack.of(case.samples)
    whole = case.stage.run(pack)
    first, second = (load_stage(case.facts, case.config, CPU, layers) for layers in (range(4), range(4, 8)))
    one = first.run(pack)
    two = second.run(pack, one.hidden_TH)
    aux = one.aux | two.aux
    assert set(aux) == set(whole.aux) and all(torch.equal(aux[layer], whole.aux[layer]) for layer in aux)
    for name in ("last_SH", "top1_S", "lse_S"):
        assert torch.equal(getattr(two, name), getattr(whole, name))


def test_training_is_taught_by_the_models_own_logits(case: Case) -> None:
    """And one optimizer step lowers the loss."""
    facts, samples = case.facts, case.samples
    head_VH, embedding_VH, norm_H = head_and_embedding(facts)
    ids_D = torch.arange(5, VOCAB, 2)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids_D] = True
    drafter = start_drafter(DrafterConfig(), facts, ids_D - torch.arange(len(ids_D)), t2d, seed=0)
    assert torch.equal(drafter.lm_head.weight, head_VH[ids_D] * facts.logits.scale)
    assert torch.equal(drafter.norm.weight, norm_H)
    if case.name.startswith("gemma"):
        before_mlp = case.plain.get_decoder().layers[7].pre_feedforward_layernorm.weight
        assert torch.equal(drafter.midlayer.post_attention_layernorm.weight, 1 + before_mlp)
    weights, draft_head_DH = Weights(drafter, torch.float32), head_VH[ids_D]
    captured = capture_pack(case.stage.parts, facts.aux_layers, samples, torch.float32, facts.logits)
    pack = make_pack([sample_of(*one) for one in zip(samples, captured, strict=True)], 3)
    objective = Objective(logits=facts.logits)
    with torch.inference_mode():
        logits_TV = torch.cat([case.plain(torch.tensor([ids])).logits[0] for ids, _ in samples])
        outputs = Unroll(weights, pack, embedding_VH, keep=False).outputs
        for k, scores in enumerate(score_steps(weights, pack, embedding_VH, draft_head_DH, objective)):
            teacher_ND = logits_TV[scores.at_N + 1 + k][:, ids_D]
            losses_N = -(teacher_ND.softmax(-1) * drafter.logits(outputs[k]).log_softmax(-1)).sum(-1)
            torch.testing.assert_close(scores.losses_N, losses_N, atol=1e-4, rtol=1e-4)
            assert scores.enters_N.tolist() == t2d[logits_TV[scores.at_N + 1 + k].argmax(-1)].tolist()
            assert scores.enters_N.any()
    counted_K = loss_weights(entering_counts(pack, t2d), 0.8).float()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)
    totals = []
    for _ in range(2):
        found = train_pack(weights, pack, embedding_VH, draft_head_DH, counted_K, objective)
        totals.append(sum(float(s.losses_N[s.enters_N].sum() * w) for s, w in zip(found, counted_K, strict=True)))
        optimizer.step()
        optimizer.zero_grad()
        weights.refresh()
    assert totals[1] < totals[0]


def sample_of(tokens: tuple[list[int], list[int]], states: Any) -> Sample:
    ids, mask = (torch.tensor(x, dtype=torch.int32) for x in tokens)
    return Sample("s", "s", ids, mask.to(torch.uint8), states.aux_TC, states.last_SH, states.top1_S, states.lse_S, None)


class Knowing:
    """Drafts what the target will say, but for some tokens."""

    aux_layers = (1, 3, 4)

    def __init__(self, text: list[int]) -> None:
        self.text, self.end = text, 0

    def reset(self) -> None:
        self.end = 1

    def extend(self, aux_TC: Tensor, next_tokens: Sequence[int]) -> None:
        assert aux_TC.shape == (len(next_tokens), 96)
        self.end += len(next_tokens)

    def draft(self, steps: int) -> list[int]:
        right = [*self.text[self.end : self.end + steps], *[0] * steps][:steps]
        places = range(self.end, self.end + steps)
        return [token if at % 5 and at % 7 else (token + 1) % VOCAB for at, token in zip(places, right, strict=True)]


def test_the_reference_engine_and_the_generator_say_what_generate_says(case: Case) -> None:
    """Prompts longer than a window and shorter, the random drafter that accepts little and one that accepts much."""
    shape = new_shape(DrafterConfig(), case.facts, 128)
    engine, _, _ = load_engine(case.config, ServeConfig(dtype="float32"), None, shape, seed=0)
    engine.eos_ids = frozenset()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (1, 5, 3 * WINDOW)]
    answers = [greedy(case.plain, prompt) for prompt in prompts]
    assert len({tuple(answer) for answer in answers}) == 3
    for prompt, answer in zip(prompts, answers, strict=True):
        assert engine.speculate(prompt, NEW_TOKENS, 3).tokens == answer
    longest = prompts[-1]
    engine.set_drafter(Knowing([*longest, *answers[-1]]))
    told = engine.speculate(longest, NEW_TOKENS, 3)
    assert told.tokens == answers[-1] and {1, 2, 3} <= {p.accepted for p in told.passes}
    group_queries(engine.model)
    waiting = deque(Request(prompt, i) for i, prompt in enumerate(prompts))
    decoded = Decoder(engine.model, eos=[], slots=2, max_new_tokens=NEW_TOKENS).run(waiting)
    assert {request.owner: answer.ids for request, answer in decoded} == dict(enumerate(answers))


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", TOWERED)
def test_towers_are_not_loaded(tmp_path: Path, name: str) -> None:
    folder = FAMILIES[name](tmp_path / "t", shard="8KB")
    config = TargetConfig(path=str(folder), dtype="float32")
    facts = read_facts(config)
    model = load_model(facts, config, CPU)
    assert not any(OTHER_TOWERS.search(tensor) for tensor in model.state_dict())
    files = tensor_files(folder)
    towers = {file for tensor, file in files.items() if OTHER_TOWERS.search(tensor)}
    alone = towers - {file for tensor, file in files.items() if not OTHER_TOWERS.search(tensor)}
    assert alone
    for file in alone:
        file.unlink()
    stage = load_stage(facts, config, CPU)
    own = set(stage.parts.decoder.state_dict())
    assert {name.removeprefix("model.language_model.") for name in model.state_dict()} == own | {"lm_head.weight"}
    if name == "kimi_k25":
        assert all(tensor.startswith("language_model.") for tensor in files if not OTHER_TOWERS.search(tensor))


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("name", ["kimi_k25", "gemma3", "gpt_oss"])
def test_tied_and_untied_heads_behind_any_prefix(tmp_path: Path, name: str, shard: str) -> None:
    """In the way that is not the family's own, whole and in the last of two stages."""
    tie = name != "gemma3"
    folder = FAMILIES[name](tmp_path / "t", tie=tie, shard=shard)
    config = TargetConfig(path=str(folder), dtype="float32")
    facts = read_facts(config)
    head, embedding, _ = head_and_embedding(facts)
    assert torch.equal(head, embedding) == tie
    pack = TokenPack.of([([5, 6, 7, 8], [0, 1, 1, 1])])
    first, last = (load_stage(facts, config, CPU, layers) for layers in (range(4), range(4, 8)))
    whole, split = load_stage(facts, config, CPU).run(pack), last.run(pack, first.run(pack).hidden_TH)
    assert whole.lse_S is not None and split.lse_S is not None and torch.equal(split.lse_S, whole.lse_S)
    expected = (whole.last_SH @ head.T).logsumexp(-1)
    torch.testing.assert_close(whole.lse_S, expected)


def resized(folder: Path, rows: dict[str, int], **config: Any) -> TargetConfig:
    """A Llama whose embedding and head have other numbers of rows, in a config with other settings."""
    FAMILIES["llama"](folder)
    tensors = load_file(folder / "model.safetensors")
    for name, count in rows.items():
        tensors[name] = torch.randn(count, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return TargetConfig(path=str(folder), dtype="float32")


BOTH = ("model.embed_tokens.weight", "lm_head.weight")


def test_padding_rows_are_tokens_like_others(tmp_path: Path) -> None:
    """More rows than the tokenizer has tokens: they take part in the softmax, as they do in engines."""
    padded = VOCAB + 27
    config = resized(tmp_path / "t", dict.fromkeys(BOTH, padded), vocab_size=padded)
    facts = read_facts(config)
    assert facts.vocab_size == padded == len(head_and_embedding(facts)[0])
    stage = load_stage(facts, config, CPU)
    model = plain_model(facts.path, torch.float32)
    assert_same(model, stage.parts, facts.aux_layers, ragged_samples(0, vocab=VOCAB), atol=2e-5)


@pytest.mark.parametrize("rows", [VOCAB - 1, VOCAB + 27])
@pytest.mark.parametrize("names", [BOTH, BOTH[:1], BOTH[1:]])
@pytest.mark.parametrize("use", [load_stage, load_model, lambda facts, *_: head_and_embedding(facts)])
def test_rows_beyond_vocab_size_or_too_few_are_refused(
    tmp_path: Path, use: Callable[..., Any], names: tuple[str, ...], rows: int
) -> None:
    config = resized(tmp_path / "t", dict.fromkeys(names, rows))
    with pytest.raises(
        TargetError, match=rf"({'|'.join(names)}).*{VOCAB}.* by .*config.json.*{rows}.*vocab_size is its rows"
    ):
        use(read_facts(config), config, CPU)


def test_samples_with_tokens_beyond_the_vocabulary_are_set_aside() -> None:
    """A tokenizer may know tokens that the model does not have (Gemma 3's image token)."""
    samples = [TokenSample(str(last), "s", "train", (1, last), (0, 1)) for last in (8, 9, 10)]
    kept, aside = set_aside_unreadable(samples, context=2, vocabulary=10)
    assert kept == samples[:2]
    assert [(q.sample_id, q.reason.partition(" (")[0]) for q in aside] == [("10", "token 10, the target has 10")]


def test_an_unknown_family_is_refused_by_what_was_looked_for(tmp_path: Path) -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4}
    GPTNeoXForCausalLM(GPTNeoXConfig(**shape, intermediate_size=64)).save_pretrained(tmp_path)
    config = TargetConfig(path=str(tmp_path), dtype="float32")
    facts = read_facts(config)
    for use in (load_stage, load_model):
        with pytest.raises(TargetError, match=r"expected a decoder with `layers` and `norm`, .* without norm"):
            use(facts, config, CPU)
    with pytest.raises(TargetError, match=r"expected embed_tokens\.weight and norm\.weight beside it"):
        head_and_embedding(facts)
    (tmp_path / "config.json").write_text(json.dumps(shape | {"model_type": "nobody_knows", "intermediate_size": 64}))
    with pytest.raises(TargetError, match="nobody_knows"):
        load_stage(facts, config, CPU)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("cohere", {"logit_scale": 0.5}),
        ("granite", {"logits_scaling": 1.0}),
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("gemma2", {"final_logit_softcapping": None}),
    ],
)
def test_a_model_whose_logits_are_others_than_its_config_says_is_refused(
    tmp_path: Path, name: str, changed: dict[str, Any]
) -> None:
    """As if its family had another key for them."""
    config = TargetConfig(path=str(FAMILIES[name](tmp_path / "t")), dtype="float32")
    text = json.loads((tmp_path / "t" / "config.json").read_text()) | changed
    with pytest.raises(TargetError, match=rf"\({name}\): expected logits .* found others"):
        load_stage(replace(read_facts(config), logits=LogitRule.of(text)), config, CPU)


TOKENIZER = '''
from transformers import PreTrainedTokenizer

class Spelling(PreTrainedTokenizer):
    """A token a character: as Kimi's, it is code that lies in the folder."""
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    vocab_size = 256

    def get_vocab(self):
        return {chr(i): i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def save_vocabulary(self, folder, filename_prefix=None):
        return ()
'''


def test_a_tokenizer_that_is_code_in_the_folder_needs_trust(tmp_path: Path) -> None:
    """The model comes from transformers all the same, whatever code for it the folder has."""
    folder = FAMILIES["kimi_k25"](tmp_path / "t")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenization_spelling.py").write_text(TOKENIZER)
    (folder / "modeling_old.py").write_text("raise ImportError('written for transformers 4')")
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {
        "AutoConfig": "modeling_old.OldConfig",
        "AutoModelForCausalLM": "modeling_old.OldForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    made = {
        "tokenizer_class": "Spelling",
        "auto_map": {"AutoTokenizer": ["tokenization_spelling.Spelling", None]},
        "eos_token": "<|end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(made))
    facts = read_facts(TargetConfig(path=str(folder)))
    with pytest.raises(TargetError, match="cannot be loaded"):
        load_tokenizer(facts, TargetConfig(path=str(folder)))
    config = TargetConfig(path=str(folder), dtype="float32", trust_remote_code=True)
    tokenizer = load_tokenizer(facts, config)
    chat = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>abc<|end|>\n"
    assert tokenizer("abc").input_ids == [97, 98, 99]
    assert load_stage(facts, config, CPU).last and type(load_model(facts, config, CPU)).__name__.startswith("Kimi_K25")
