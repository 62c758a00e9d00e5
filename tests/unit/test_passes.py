"""Verify passes and times from streamed chunks, against slow obvious twins; versions; vLLM's recorded answers."""

import itertools
import json
import math
import random
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_eagle.config import ServeConfig
from ray_eagle.errors import ConfigError, InputError, ServingError
from ray_eagle.serving.engine import Speculation, Work
from ray_eagle.serving.generation import Generation, VerifyPass, complete_passes
from ray_eagle.serving.passes import BLOCK, Answer, ended, full_batch, step_seconds, verify_passes
from ray_eagle.serving.server import Models, as_read
from ray_eagle.serving.streams import Reply
from ray_eagle.serving.versions import RELEASES, release_of
from ray_eagle.serving.vllm import VLLM, Counters, read_counters
from tests.tiny import tiny_shape

STEPS = 4


def simulate(rng: random.Random) -> tuple[list[int], list[tuple[int, int]], int]:
    """Tokens of an answer, its passes as (start, accepted), and the prompt's length; the last pass may reach beyond."""
    prompt_length, count = rng.randint(1, 9), rng.randint(1, 40)
    tokens = [rng.randint(0, 99) for _ in range(count)]
    passes, made = [], 1
    while made < count:
        accepted = rng.randint(0, STEPS)
        passes.append((prompt_length + made - 2, accepted))
        made += accepted + 1
    return tokens, passes, prompt_length


def chunked(tokens: list[int], passes: list[tuple[int, int]], told: bool = True) -> Answer:
    counts, left = [1], len(tokens) - 1
    for _, accepted in passes:
        counts.append(min(accepted + 1, left))
        left -= counts[-1]
    times = [10 + 0.5 * i for i in range(len(counts))]
    accepted_counts = sorted(j for _, j in passes) if told and passes else None
    return Answer(tokens, counts, times, 9.0, stopped=False, accepted=accepted_counts)


def merged(answer: Answer, at: int) -> Answer:
    """Chunks `at` and `at` + 1 arrive as one, when the second does."""
    counts, times = list(answer.counts), list(answer.times)
    counts[at : at + 2] = [counts[at] + counts[at + 1]]
    del times[at]
    return Answer(answer.tokens, counts, times, answer.started, answer.stopped, answer.accepted)


@pytest.mark.parametrize("seed", range(60))
def test_one_chunk_a_pass_gives_every_pass_in_order(seed: int) -> None:
    tokens, expected, prompt_length = simulate(random.Random(seed))
    passes = verify_passes(chunked(tokens, expected), prompt_length, STEPS)
    assert [(p.start, p.accepted) for p in passes] == expected
    for p in passes:
        first = p.start + 2 - prompt_length
        assert p.drafted == tokens[first : first + p.accepted]
        inside = first + p.accepted < len(tokens)
        assert p.bonus == (tokens[first + p.accepted] if inside else -1)
    untold = verify_passes(chunked(tokens, expected, told=False), prompt_length, STEPS)
    assert [p.start for p in untold] == [start for start, _ in expected]
    # without counts of the server's the last pass is known as far as the answer goes
    assert [p.accepted for p in untold[:-1]] == [j for _, j in expected[:-1]]


@pytest.mark.parametrize("seed", range(60))
def test_an_end_inside_the_last_chunk_is_the_end(seed: int) -> None:
    rng = random.Random(seed)
    tokens, passes, _ = simulate(rng)
    answer = replace(chunked(tokens, passes), gaps=[float(i) for i in range(len(tokens))])
    ends = set(rng.sample(range(100), 15))
    last = range(len(tokens) - answer.counts[-1], len(tokens))
    found = ended(answer, ends)
    kept = min([i + 1 for i in last if tokens[i] in ends], default=len(tokens))
    assert (found.tokens, found.gaps) == (tokens[:kept], answer.gaps[:kept])
    assert sum(found.counts) == kept and found.counts[:-1] == answer.counts[:-1] and found.counts[-1] > 0
    assert found.stopped == (kept < len(tokens)) and found.times == answer.times and found.accepted == answer.accepted


@pytest.mark.parametrize("seed", range(60))
def test_merged_chunks_keep_the_counts(seed: int) -> None:
    rng = random.Random(seed)
    tokens, expected, prompt_length = simulate(rng)
    if len(expected) < 2:
        return
    answer = merged(chunked(tokens, expected), rng.randint(0, len(expected) - 1))
    passes = verify_passes(answer, prompt_length, STEPS)
    if passes[0].start == -1:
        assert Counter(p.accepted for p in passes) == Counter(j for _, j in expected)
        assert all(p.start == -1 for p in passes)
    else:  # the prefill's chunk swallowed the first pass, which is still one chunk of its own kind
        assert [(p.start, p.accepted) for p in passes] == expected


def test_counts_beyond_what_was_asked_for_are_refused() -> None:
    with pytest.raises(ServingError, match="at most 3 accepted"):
        verify_passes(Answer([1, 2], [1, 1], [0, 1], 0, False, accepted=[4]), 2, 3)


def test_passes_of_unknown_start_count_as_complete() -> None:
    passes = [VerifyPass(2, [], 1, 5), VerifyPass(40, [], 1, 5), VerifyPass(-1, [], 2, -1)]
    made = Generation([1] * 20, passes, "length", 0.0, 0.0, 19, 0.0)
    assert complete_passes(made, 3, 3) == [passes[0], passes[2]]


def slow_step(answer: Answer, steps_made: int | None, window: tuple[float, float]) -> float:
    """One interval after the other; each block of at least BLOCK cycles is averaged, and the median block counts."""
    blocks, block = [], []
    tokens = len(answer.tokens) - 1
    sizes = [count for count in [answer.counts[0] - 1, *answer.counts[1:]] if count]
    for i in range(1, len(answer.counts)):
        if answer.times[i - 1] >= window[0] and answer.times[i] <= window[1]:
            if steps_made is None:
                cycles = float(answer.counts[i])
            elif steps_made == len(sizes):
                cycles = 1.0
            else:
                cycles = answer.counts[i] * steps_made / tokens
            block.append((answer.times[i] - answer.times[i - 1], cycles))
            if sum(c for _, c in block) >= BLOCK:
                blocks.append(sum(s for s, _ in block) / sum(c for _, c in block))
                block = []
    if blocks:
        return statistics.median(blocks)
    return sum(s for s, _ in block) / sum(c for _, c in block) if block else 0.0


@pytest.mark.parametrize("seed", range(40))
def test_the_time_of_a_step_is_the_median_block_inside_the_window(seed: int) -> None:
    rng = random.Random(seed)
    tokens, expected, _ = simulate(rng)
    answer = chunked(tokens, expected)
    times = list(itertools.accumulate(rng.uniform(0.001, 0.1) for _ in answer.counts))
    answer = Answer(tokens, answer.counts, times, 0.0, False, answer.accepted)
    if len(expected) > 3 and rng.random() < 0.5:
        answer = merged(answer, rng.randint(1, len(expected) - 1))
    low, high = sorted(rng.uniform(0, times[-1]) for _ in range(2))
    for window in ((-math.inf, math.inf), (low, high), (math.inf, -math.inf)):
        for made in (None, len(expected)):
            assert step_seconds(answer, made, window) == pytest.approx(slow_step(answer, made, window))


def test_a_hiccup_does_not_move_the_time_of_a_step() -> None:
    times = [i * 0.002 + (3.0 if i > 40 else 0.0) for i in range(200)]
    answer = Answer([1] * 200, [1] * 200, times, 0.0, False)
    assert step_seconds(answer, None, full_batch([answer])) == pytest.approx(0.002)


def test_a_batch_is_full_from_the_last_start_to_the_first_end() -> None:
    answers = [Answer([1, 2], [1, 1], [start, end], 0, False) for start, end in ((1, 9), (3, 8), (2, 10))]
    assert full_batch(answers) == (3, 8)
    at_once = Answer([1], [1], [2.5], 0, True)
    assert full_batch([*answers, at_once]) == (3, 8), "it decodes nothing"
    late = Answer([1, 2], [1, 1], [8.5, 12], 0, False)
    for never_full in ([*answers, late], [at_once]):
        window = full_batch(never_full)
        assert [step_seconds(answer, None, window) for answer in never_full] == [0] * len(never_full)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20", "0.5.23", "0.5.23.post2", "0.5.18+cu130"])
def test_known_versions(version: str) -> None:
    assert release_of(version).histogram[0] == "spec_correct_drafts_histogram"


def test_aliases_end_with_the_release_that_dropped_them() -> None:
    assert {v for v, names in RELEASES.items() if "spec_accept_histogram" in names.histogram} == {
        f"0.5.{n}" for n in (17, 18, 19, 20)
    }


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.5.23rc1", "nightly", ""])
def test_unknown_versions_are_refused_unless_one_says_what_they_are(version: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.5\.17 to 0\.5\.23.*serve\.version"):
        release_of(version)
    assert release_of(version, "0.5.21") == RELEASES["0.5.21"]


# vLLM, on recorded answers

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} %d.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="2"} %d.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7e9
"""


def metrics(accepted: list[int]) -> str:
    reached = [sum(j > i for j in accepted) for i in range(3)]
    return METRICS % (len(accepted), 3 * len(accepted), sum(accepted), *reached)


MODELS = Models(Path("/models/target"), None, tiny_shape(), 8, "llama", vocab_size=260, max_positions=512, seed=0)


@pytest.fixture
def vllm() -> VLLM:
    return VLLM(ServeConfig(engine="vllm", python="python-with-vllm", gpus=2), MODELS)


def streamed(chunks: list[list[int]], reason: str = "length") -> Reply:
    events = []
    for i, ids in enumerate(chunks):
        end = reason if i == len(chunks) - 1 else None
        choice = {"index": 0, "text": "x", "token_ids": ids, "logprobs": None, "finish_reason": end}
        events.append((0.1 * i, json.dumps({"id": "cmpl-1", "choices": [choice]}).encode()))
    events.append((0.1 * len(chunks), b'{"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 3}}'))
    return Reply(0.0, 200, events)


@pytest.mark.parametrize("seed", range(20))
def test_counters_are_differenced_into_a_histogram(seed: int) -> None:
    rng = random.Random(seed)
    before = [rng.randint(0, 3) for _ in range(rng.randint(0, 30))]
    run = [rng.randint(0, 3) for _ in range(rng.randint(0, 30))]
    made = read_counters(metrics(before + run)).since(read_counters(metrics(before)))
    assert (made.drafts, made.accepted) == (len(run), sum(run))
    assert made.passes() == sorted(run)


def test_vllms_chunks_are_passes_as_long_as_the_counters_agree(vllm: VLLM) -> None:
    answer = vllm.answer(streamed([[5], [6, 7], [8], [9, 10, 11]]))
    assert (answer.tokens, answer.counts) == ([5, 6, 7, 8, 9, 10, 11], [1, 2, 1, 3])
    zero = Counters(0, 0, {})
    alone = {"speculating": True, "undisturbed": True}
    assert vllm.counted([answer], zero, read_counters(metrics([1, 0, 2])), **alone) == [answer]
    [fallen_back] = vllm.counted([answer], zero, read_counters(metrics([1, 0, 1, 0])), **alone)
    assert fallen_back.accepted == [0, 0, 1, 1]
    with pytest.raises(ServingError, match="concurrency 1"):
        vllm.counted([answer, answer], zero, read_counters(metrics([1, 0, 2])), **alone)
    assert vllm.counted([answer], zero, zero, speculating=False, undisturbed=True) == [answer]
    with pytest.raises(ServingError, match="does not speculate"):
        vllm.counted([answer], zero, zero, **alone)
    first_token_only = vllm.answer(streamed([[5]]))
    assert vllm.counted([first_token_only], zero, zero, **alone) == [first_token_only], "nothing was left to draft"
    others = read_counters(metrics([1, 0, 1, 0]))
    assert vllm.counted([answer], zero, others, speculating=True, undisturbed=False) == [answer], "of other answers"


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (Reply(0, 400, [(0, b'{"error": {"message": "too long", "code": 400}}')]), InputError, "too long"),
        (Reply(0, 500, [(0, b'{"error": "out of memory"}')]), ServingError, "out of memory"),
        (Reply(0, 200, [(0, b"<html>")]), ServingError, "JSON object"),
        (Reply(0, 200, [(0, b'{"choices": [{"text": "a"}]}')]), ServingError, "token_ids"),
        (Reply(0, 200, []), ServingError, "broke off after 0 tokens"),
    ],
)
def test_what_vllm_says_otherwise_is_explained(vllm: VLLM, reply: Reply, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vllm.answer(reply)


def test_vllm_is_asked_for_gaps_without_a_stream(vllm: VLLM) -> None:
    assert "logprobs" not in vllm.body(Work([1], 4))
    assert vllm.body(Work([1], 4, gaps=True))["logprobs"] == 2
    top = [{"a": -0.1, "b": -0.6}, {"a": -2.0, "b": -0.5, "c": -0.25}]
    choice: dict[str, Any] = {"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"top_logprobs": top}}
    answer = vllm.answer(Reply(0, 200, [(1, json.dumps({"choices": [choice]}).encode())]))
    assert answer.gaps == pytest.approx([0.5, 0.25]) and answer.stopped


def test_vllms_command_line(vllm: VLLM) -> None:
    words = vllm.command(1234, Speculation(steps=3), Path("/d"))
    assert words[:3] == ["python-with-vllm", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert json.loads(words[-1]) == {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}
    assert "--speculative-config" not in vllm.command(1234, None, Path("/d"))
    with pytest.raises(ConfigError, match="chain"):
        vllm.flags(Speculation(steps=3, topk=2), "/d")
    with pytest.raises(ConfigError, match="simulated acceptance"):
        vllm.flags(Speculation(steps=3, simulated=2), "/d")


def test_vllm_reads_layer_ids_as_inputs(vllm: VLLM, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    (folder / "config.json").write_text(json.dumps({**ids, "eagle_config": {**ids, "use_aux_hidden_state": True}}))
    copy = as_read(folder, vllm.reads(), MODELS, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True}
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((folder / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
