"""The sglang engine against a stand-in for its server: real processes, real HTTP, every way to fail."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_eagle.config import ServeConfig
from ray_eagle.drafter.checkpoint import check_drafter, save_drafter
from ray_eagle.drafter.files import read_config
from ray_eagle.errors import ConfigError, EagleError, InputError, ServingError
from ray_eagle.serving import child, supervisor
from ray_eagle.serving.engine import Speculation, Work
from ray_eagle.serving.server import Models, ServerEngine, as_read, both_fit
from ray_eagle.serving.sglang import SGLang
from tests.standin import expected_passes, plain_answer, write_interpreter
from tests.tiny import tiny_drafter, tiny_shape

GONE_S = 12


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Records and logs of this test alone, and no process left at its end."""
    folder = tmp_path / "servers"
    folder.mkdir()
    monkeypatch.setattr(child, "state_folder", lambda: folder)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.3)
    yield folder
    marks = [path.stem for path in folder.glob("*.log")]
    assert await_gone(marks) == set()


def await_gone(marks: list[str]) -> set[int]:
    """Processes that still carry one of these marks after a while."""
    deadline = time.monotonic() + GONE_S
    while left := {pid for mark in marks for pid in supervisor.marked(mark)}:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return set()


def start(
    folder: Path,
    *,
    installed: str = "0.5.17",
    mode: str = "ok",
    drafter: Path | None = None,
    ends: frozenset[int] = frozenset(),
    **settings: Any,
) -> Any:
    """The engine on the stand-in."""
    env = {"STANDIN_VERSION": installed, "STANDIN_MODE": mode, "STANDIN_FILE": str(folder / "file")}
    config = ServeConfig.model_validate(
        {
            "engine": "sglang",
            "python": str(write_interpreter(folder)),
            "env": {**env, **settings.pop("env", {})},
            "start_s": 20,
            "hang_s": 10,
            **settings,
        }
    )
    models = Models(
        Path("/models/target"), drafter, tiny_shape(), 8, "llama", vocab_size=260, max_positions=512, seed=3, ends=ends
    )
    return ServerEngine(SGLang(config, models), config, models)


@pytest.mark.parametrize(
    ("model_type", "written"), [("llama", [1, 3, 4]), ("deepseek_v3", [1, 3, 4]), ("kimi_k2", [3, 4, 6])]
)
def test_a_drafter_says_its_layers_as_the_server_reads_them(
    tmp_path: Path, model_type: str, written: list[int]
) -> None:
    """For the families that it reads by the first id, unless that is 1: [3, 4, 6] are the outputs of 2, 3 and 5."""
    outputs = (2, 3, 5) if model_type == "kimi_k2" else (1, 3, 4)
    shape = tiny_shape(aux_layers=outputs)
    folder = tmp_path / "drafter"
    save_drafter(tiny_drafter(shape), folder)
    config = ServeConfig(
        engine="sglang", python=str(write_interpreter(tmp_path)), env={"STANDIN_VERSION": "0.5.23"}
    )  # fmt: skip
    models = Models(Path("/models/target"), folder, shape, 8, model_type, vocab_size=260, max_positions=512, seed=3)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    given = as_read(folder, SGLang(config, models).reads(), models, scratch)
    assert (given == folder) == (written == list(outputs))
    assert read_config(given)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written
    assert (given / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    made = start(tmp_path)
    yield made
    made.close()


def test_answers_come_with_every_verify_pass(engine: Any) -> None:
    prompts = [[5, 6, 7], [9], [100, 150]]
    made = engine.generate([Work(ids, 40) for ids in prompts], concurrency=3)
    for ids, answer in zip(prompts, made, strict=True):
        assert answer.tokens == plain_answer(ids, 40)
        assert [(p.start, p.accepted) for p in answer.passes] == expected_passes(ids, 40, 3)
        for each in answer.passes[:-1]:
            first = each.start + 2 - len(ids)
            assert each.drafted == answer.tokens[first : first + each.accepted]
            assert each.bonus == answer.tokens[first + each.accepted]
        assert (answer.finish_reason, answer.decode_tokens) == ("length", 39)
        # 3.5 ms a cycle, and what a busy machine adds
        assert 0.002 < answer.step_seconds < 0.1
        assert answer.decode_seconds > 0 and answer.prefill_seconds > 0


def test_it_restarts_to_decode_plainly_and_back(engine: Any) -> None:
    speculating = engine.facts()
    assert (speculating.version, speculating.max_concurrency, speculating.simulated) == ("0.5.17", 16, [])
    assert speculating.speculation == Speculation(steps=3) and "EAGLE3" in speculating.flags
    engine.configure(Speculation(steps=3))
    assert engine.facts() == speculating, "nothing to change, nothing restarted"
    engine.configure(None)
    plain = engine.facts()
    assert plain.server != speculating.server and plain.flags == [] and plain.speculation is None
    answer = engine.generate([Work([5], 20, gaps=True), Work([6], 20)])
    assert answer[0].tokens == plain_answer([5], 20) and answer[0].passes == []
    assert answer[0].gaps == pytest.approx([0.125] * 20) and answer[1].gaps == []
    engine.configure(Speculation(steps=5, topk=4, draft_tokens=16))
    flags = engine.facts().flags
    assert flags[flags.index("--speculative-eagle-topk") + 1] == "4"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "16"


def test_two_servers_side_by_side(tmp_path: Path, own_state: Path) -> None:
    """The one without speculation stays; each counts its own requests; one that dies is the end of both."""
    engine = start(tmp_path, memory_share=0.4)
    drafting = engine.facts()
    engine.generate([Work([5], 20)])
    engine.configure(None)
    plain = engine.facts()
    assert drafting.side_by_side and len({drafting.server, plain.server}) == 2
    assert engine.generate([Work([6], 20)])[0].passes == []
    for before, requests in ((drafting, 1), (plain, 1)):
        engine.configure(before.speculation)
        now = engine.facts()
        assert (now.server, now.requests) == (before.server, requests), "it never stopped"
    engine.configure(Speculation(steps=2))
    assert engine.facts().server != drafting.server
    assert len(engine.generate([Work([6], 20)])[0].passes) == len(expected_passes([6], 20, 2))
    engine.configure(None)
    assert engine.facts().server == plain.server
    engine.configure(Speculation(steps=2))
    other = engine._servers[False].child
    os.kill(other.pid, signal.SIGKILL)
    with pytest.raises(ServingError, match="the server died"):
        for _ in range(100):
            engine.check()
            time.sleep(0.05)
    assert await_gone([path.stem for path in own_state.glob("*.log")]) == set()
    engine.close()


@pytest.mark.parametrize(
    ("share", "asked", "both"),
    [(None, None, False), (0.6, None, False), (0.45, None, True), (0.45, False, False), (None, True, True)],
)
def test_two_servers_stay_up_where_both_fit(share: float | None, asked: bool | None, both: bool) -> None:
    assert both_fit(ServeConfig(memory_share=share, side_by_side=asked)) == both


def test_what_follows_the_end_in_the_last_pass_is_cut(tmp_path: Path) -> None:
    """As SGLang 0.5.17 leaves it when the limit is reached in the same pass; an end that a pass before ran over stays."""
    count = next(n for n in range(9, 40) if (answer := plain_answer([5], n)) and last_chunk([5], n) >= 3)
    engine = start(tmp_path, ends=frozenset({answer[-2]}))
    made = engine.generate([Work([5], count)])[0]
    assert (made.tokens, made.finish_reason) == (answer[:-1], "stop")
    assert [(p.start, p.accepted) for p in made.passes] == expected_passes([5], count, 3)
    assert engine.generate([Work([5], count, past_end=True)])[0].tokens == answer
    engine.close()
    engine = start(tmp_path, ends=frozenset({answer[2]}))
    assert engine.generate([Work([5], count)])[0].tokens == answer
    engine.close()


def last_chunk(prompt: list[int], count: int) -> int:
    """Tokens that the last pass of the stand-in's answer adds."""
    return count - (expected_passes(prompt, count, 3)[-1][0] + 2 - len(prompt))


def test_a_random_drafter_is_one_that_the_server_can_load(tmp_path: Path) -> None:
    engine = start(tmp_path)
    flags = engine.facts().flags
    folder = Path(engine._drafter)
    assert check_drafter(folder) == tiny_shape()
    assert flags[flags.index("--speculative-draft-model-path") + 1] == "random"
    assert "--skip-tokenizer-init" in engine._current.child.log.read_text().splitlines()[0], "its text is nobody's"
    engine.close()
    assert not folder.exists()
    save_drafter(tiny_drafter(tiny_shape()), tmp_path / "drafter")
    engine = start(tmp_path, drafter=tmp_path / "drafter")
    assert "--skip-tokenizer-init" not in engine._current.child.log.read_text().splitlines()[0]
    engine.close()


def test_every_flag_reaches_the_command_line(tmp_path: Path) -> None:
    engine = start(
        tmp_path,
        gpus=2,
        dtype="float16",
        args=["--attention-backend", "triton"],
        draft_attention="flashinfer",
        context_length=400,
        memory_share=0.4,
        max_running=4,
        env={"GREETING": "hello $HOME"},
    )
    command = engine._current.child.log.read_text().splitlines()[0].split()
    for name, value in {
        "--tp-size": "2",
        "--dtype": "float16",
        "--attention-backend": "triton",
        "--speculative-draft-attention-backend": "flashinfer",
        "--context-length": "400",
        "--mem-fraction-static": "0.4",
        "--max-running-requests": "4",
        "--cuda-graph-max-bs-decode": "4",
        "--host": "127.0.0.1",
        "--decode-log-interval": "1",
        "--random-seed": "3",
        "--speculative-algorithm": "EAGLE3",
    }.items():
        assert command[command.index(name) + 1] == value, name
    assert "--disable-radix-cache" in command
    environment = Path(f"/proc/{engine._current.child.pid}/environ").read_text().split("\0")
    assert f"GREETING=hello {os.environ['HOME']}" in environment
    engine.close()


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20.post1"])
def test_former_names_of_the_figures_are_read(tmp_path: Path, version: str) -> None:
    engine = start(tmp_path, installed=version, mode="old-names")
    [answer] = engine.generate([Work([7], 30)])
    assert [(p.start, p.accepted) for p in answer.passes] == expected_passes([7], 30, 3)
    engine.close()


def test_merged_chunks_leave_the_order_unknown_but_not_the_counts(tmp_path: Path) -> None:
    engine = start(tmp_path, mode="merged")
    [answer] = engine.generate([Work([7], 60)])
    expected = expected_passes([7], 60, 3)
    assert [p.start for p in answer.passes] == [-1] * len(expected)
    assert sorted(p.accepted for p in answer.passes) == sorted(j for _, j in expected)
    assert 0.002 < answer.step_seconds < 0.1
    engine.close()


@pytest.mark.parametrize(
    ("mode", "version", "error", "message"),
    [
        ("ok", "", ConfigError, r"no sglang.*PackageNotFoundError.*serve\.python"),
        ("ok", "0.4.9", ConfigError, r"0\.4\.9.*0\.5\.17 to 0\.5\.23.*serve\.version"),
        ("ok", "0.6.0rc1", ConfigError, r"0\.6\.0rc1"),
        ("dies", "0.5.17", ServingError, r"(?s)ended before it was healthy.*CUDA out of memory"),
        ("never", "0.5.17", ServingError, r"(?s)not healthy within 1\.5 s.*serve\.start_s.*still capturing graphs"),
        ("silent", "0.5.17", ServingError, r"(?s)hangs.*serve\.hang_s.*the stand-in reads its weights"),
    ],
)
def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, mode: str, version: str, error: type[EagleError], message: str
) -> None:
    limits = {"start_s": 1.5, "hang_s": 10} if mode == "never" else {"hang_s": 1}
    with pytest.raises(error, match=message):
        start(tmp_path, installed=version, mode=mode, **limits)


def test_an_unknown_version_can_be_treated_as_a_known_one(tmp_path: Path) -> None:
    engine = start(tmp_path, installed="0.5.99", version="0.5.23")
    [answer] = engine.generate([Work([7], 30)])
    assert [(p.start, p.accepted) for p in answer.passes] == expected_passes([7], 30, 3)
    assert engine.facts().version == "0.5.99"
    engine.close()


def test_a_server_that_starts_slowly_is_waited_for(tmp_path: Path) -> None:
    engine = start(tmp_path, mode="slow")
    engine.health()
    engine.check()
    engine.close()


@pytest.mark.parametrize(
    ("mode", "version", "message"),
    [
        ("broken", "0.5.17", r"expected a JSON object.*\{not json"),
        ("other-names", "0.5.17", r"acceptance figures.*spec_correct_drafts_histogram.*'spec_hits'"),
        (
            "old-names",
            "0.5.21",
            r"acceptance figures.*expected spec_correct_drafts_histogram and.*spec_accept_histogram",
        ),
        ("wrong-counts", "0.5.17", "contradict each other"),
    ],
)
def test_an_answer_that_is_not_understood_is_not_guessed(tmp_path: Path, mode: str, version: str, message: str) -> None:
    engine = start(tmp_path, installed=version, mode=mode)
    with pytest.raises(ServingError, match=message):
        engine.generate([Work([7], 30)])
    engine.close()


def test_logs_of_servers_that_run_are_kept(engine: Any, own_state: Path) -> None:
    old = time.time() - 1000
    for number in range(child.KEPT_LOGS + 3):
        (own_state / f"old-{number}.log").touch()
    os.utime(engine._current.child.log, (old, old))
    log = engine._current.child.log
    engine._current.child._forget_old_logs(own_state)
    assert log.exists() and len(list(own_state.glob("old-*.log"))) <= child.KEPT_LOGS


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [
        ([], 4, "at least one token"),
        ([300], 4, "from 0 to 259"),
        ([1] * 500, 20, "at most 512"),
        ([1], 0, "at least one"),
    ],
)
def test_a_prompt_that_does_not_fit_never_reaches_the_server(
    engine: Any, ids: list[int], count: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate([Work(ids, count)])


def test_a_restart_waits_for_the_answers_under_way(engine: Any) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(engine.generate([Work([7], 200)])))
    thread.start()
    time.sleep(0.1)
    engine.configure(None)
    thread.join()
    assert found[0].tokens == plain_answer([7], 200)
    assert engine.facts().speculation is None


def test_simulated_acceptance_is_seen(tmp_path: Path) -> None:
    engine = start(tmp_path, env={"SGLANG_SIMULATE_ACC_LEN": "3"})
    assert engine.facts().simulated == ["SGLANG_SIMULATE_ACC_LEN=3"]
    engine.close()
    engine = start(tmp_path, env={"SGLANG_SIMULATE_ACC_LEN": "-1"})
    assert engine.facts().simulated == []
    engine.close()
