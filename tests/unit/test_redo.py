"""What decides the key of a stage, and so what it skips, redoes, or refuses to read."""

import json
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ray_eagle.config import Config
from ray_eagle.errors import OriginError
from ray_eagle.run import Origin, RunFolder
from ray_eagle.stage import Outcome
from ray_eagle.stages import KINDS, Pipeline, deciding
from tests.tiny import tiny_target
from tests.unit.test_vocab import random_rows, write_dataset

# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "values", "counts"),
    [
        ("serve", {"env": {"SGLANG_X": "1"}}, True),
        ("serve", {"python": "/opt/sglang/bin/python"}, True),
        ("serve", {"gpus": 2}, True),
        ("probe", {"url": "http://there:8000"}, True),
        ("probe", {"steps": 5}, True),
        ("serve", {"steps": 5}, False),
        ("serve", {"engine": "sglang", "topk": 4, "draft_tokens": 8}, None),
        ("serve", {"port": 4242}, False),
        ("serve", {"start_s": 4242}, False),
    ],
)
def test_what_changes_a_measurement_is_in_its_key_and_nothing_else(
    section: str, values: dict[str, Any], counts: bool | None
) -> None:
    """None: apart from the engine, which counts."""
    target = {"target": {"path": "t"}}
    base = {"engine": "sglang"} if counts is None else {}
    before = deciding(Config.model_validate({**target, section: base}), section)
    after = deciding(Config.model_validate({**target, section: values}), section)
    assert (before != after) == bool(counts)


# --- stages ---------------------------------------------------------------------------------------------------------


class Said:
    """Keeps what a stage tells its user."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self, task: str, total: float, unit: str) -> None: ...

    def advance(self, amount: float, note: str = "") -> None: ...

    def say(self, message: str) -> None:
        self.lines.append(message)


class Bench:
    """A run whose conversations and states are there, so that `vocab` can run without Ray."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.run = RunFolder.open(str(folder / "run"))
        (folder / "prompts.jsonl").write_text('{"id": "a", "turns": ["A?"]}\n')
        self.settings: dict[str, Any] = {
            "target.path": str(target),
            "target.aux_layers": [1, 3, 4],
            "generate.prompts": str(folder / "prompts.jsonl"),
            "vocab.size": 20,
        }
        write_dataset(self.run.of("extract"), random_rows(1, list(range(60, 90))))
        pipeline, _ = self.pipeline()
        for stage in ("generate", "extract"):
            origin = pipeline._origin(stage)
            self.run.write_origin(origin.model_copy(update={"finished": "2026-01-01T00:00:00+00:00"}))

    def pipeline(self, **changes: Any) -> tuple[Pipeline, list[str]]:
        tree: dict[str, Any] = {}
        for key, value in {**self.settings, **{k.replace("__", "."): v for k, v in changes.items()}}.items():
            section, _, leaf = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[leaf] = value
        said = Said()
        return Pipeline(Config.model_validate(tree), self.run, said), said.lines

    def refusal(self, stage: str, **changes: Any) -> str:
        before = {p: p.stat().st_mtime_ns for p in Path(self.run.path).rglob("*")}
        with pytest.raises(OriginError) as caught:
            self.pipeline(**changes)[0].stage(stage)
        assert {p: p.stat().st_mtime_ns for p in Path(self.run.path).rglob("*")} == before
        return str(caught.value)


@pytest.fixture
def bench(tmp_path: Path, target_folder: Path) -> Bench:
    return Bench(tmp_path, target_folder)


def test_a_finished_stage_is_skipped_and_says_so(bench: Bench) -> None:
    pipeline, said = bench.pipeline()
    assert pipeline.stage("vocab") is not None
    assert said[-1] == "vocab: done in 0 s"
    origin = bench.run.finished("vocab")
    assert origin is not None
    assert (origin.samples, origin.bytes > 0, origin.versions["ray"] != "") == (20, True, True)
    assert origin.target_path == bench.settings["target.path"]

    marker = Path(bench.run.of("vocab").file("marker"))
    marker.touch()
    pipeline, said = bench.pipeline()
    assert pipeline.stage("vocab") is None
    assert said == [f"vocab: done already ({origin.finished}, 0 s)"]
    assert bench.run.origin("vocab") == origin

    pipeline, said = bench.pipeline()
    assert pipeline.stage("vocab", redo=True) is not None
    assert not marker.exists()
    assert bench.run.finished("vocab") is not None


def test_a_changed_setting_is_named_with_the_way_out(bench: Bench) -> None:
    bench.pipeline()[0].stage("vocab")
    message = bench.refusal("vocab", vocab__size=30, vocab__report_sizes=[7])
    assert message.startswith(f"{bench.run.path}/vocab was made from other settings or inputs: ")
    assert "settings.vocab.size: 20 -> 30" in message
    assert "settings.vocab.report_sizes: [1000, 2000, 4000, 8000, 16000, 32000, 64000] -> [7]" in message
    assert message.endswith("Use another run folder (--run), or redo it: `ray-eagle vocab --redo`.")

    assert bench.pipeline(vocab__size=30)[0].stage("vocab", redo=True) is not None
    assert bench.run.of("vocab").read_json("vocab.json")["size"] == 30


def test_an_unfinished_stage_of_other_settings_is_refused_and_of_the_same_goes_on(bench: Bench) -> None:
    origin = bench.pipeline()[0]._origin("vocab")
    bench.run.write_origin(origin)
    bench.run.of("vocab").write_bytes("half-made", b"something")
    assert "settings.vocab.size: 20 -> 21" in bench.refusal("vocab", vocab__size=21)
    assert bench.pipeline()[0].stage("vocab") is not None
    assert bench.run.finished("vocab") is not None


class Interrupted:
    """A filesystem whose user presses Ctrl-C at one of the deletions."""

    def __init__(self, fs: Any, at: int) -> None:
        self._fs, self.left = fs, at

    def __getattr__(self, name: str) -> Any:
        if name.startswith("delete"):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return getattr(self._fs, name)


@pytest.mark.parametrize("stage", ["generate", "train"])
def test_what_an_interrupted_redo_leaves_is_not_taken_for_the_new_settings(bench: Bench, stage: str) -> None:
    def left() -> list[str]:
        names = [p.name for folder in folders for p in Path(folder.path).rglob("*") if p.is_file()]
        return sorted(names)

    pipeline, _ = bench.pipeline()
    folders = [bench.run.of(stage)] + [bench.run.folder(n) for n in ("checkpoints", "logs") if stage == "train"]
    found, at = {"some"}, 0
    while found:
        at += 1
        origin = Origin(stage=stage, settings={}, inputs={}, target={}, finished="2026-01-01T00:00:00+00:00")
        for folder in folders:
            for name in ("a", "parts/b", "z"):
                folder.write_bytes(name, b"old")
        bench.run.write_origin(origin)
        pipeline.run = RunFolder(Interrupted(bench.run.fs, at), bench.run.path)
        with suppress(KeyboardInterrupt):
            pipeline._discard(stage)
        found = set(left())
        if found:
            kept = bench.run.origin(stage)
            assert kept and not kept.finished and kept.key == origin.key, f"deletion {at}"
    assert at > 4, "the deletions were interrupted one after another"


def test_the_time_of_an_attempt_that_failed_counts(bench: Bench) -> None:
    class Fails(Pipeline):
        def _call(self, name: str) -> Outcome:
            time.sleep(0.05)
            raise KeyboardInterrupt

    pipeline, _ = bench.pipeline()
    times = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            Fails(pipeline.config, bench.run, pipeline.progress).stage("vocab")
        failed = bench.run.origin("vocab")
        assert failed and not failed.finished
        times.append(failed.seconds)
    pipeline.stage("vocab")
    done = bench.run.finished("vocab")
    assert done and 0.05 <= times[0] <= times[1] - 0.05 and times[1] <= done.seconds


def test_a_stage_that_made_nothing_yet_may_start_with_other_settings(bench: Bench) -> None:
    bench.run.write_origin(bench.pipeline()[0]._origin("vocab"))
    assert bench.pipeline(vocab__size=21)[0].stage("vocab") is not None
    assert bench.run.of("vocab").read_json("vocab.json")["size"] == 21


def test_machine_settings_redo_nothing(bench: Bench) -> None:
    bench.pipeline()[0].stage("vocab")
    changes = {"extract__actors": 8, "generate__gpus": 1, "extract__cpus": 3, "serve__port": 99, "ray__address": "x:1"}
    assert bench.pipeline(**changes)[0].stage("vocab") is None


@pytest.mark.parametrize(
    ("change", "upstream", "named"),
    [  # conversations are the input of extract, states that of vocab
        ({"generate__max_new_tokens": 7}, "conversations", "settings.generate.max_new_tokens: 512 -> 7"),
        ({"extract__state_dtype": "float32"}, "hidden_states", "settings.extract.state_dtype: 'bfloat16' -> 'float32'"),
        ({"target__aux_layers": [1, 2, 4]}, "conversations", "settings.target.aux_layers: [1, 3, 4] -> [1, 2, 4]"),
        ({"target__dtype": "float32"}, "conversations", "settings.target.dtype: 'auto' -> 'float32'"),
        ({"seed": 5}, "conversations", "settings.seed: 0 -> 5"),
    ],
)
def test_an_input_made_otherwise_is_refused(bench: Bench, change: dict[str, Any], upstream: str, named: str) -> None:
    message = bench.refusal("vocab", **change)
    reader = {"conversations": "extract", "hidden_states": "vocab"}[upstream]
    assert message.startswith(f"{reader}: its input does not belong to these settings. ")
    assert f"{bench.run.path}/{upstream} was made from other settings or inputs: {named}" in message
    assert "--redo`" in message


def test_changed_prompts_are_an_input_made_otherwise(bench: Bench) -> None:
    bench.pipeline()[0].stage("vocab")
    prompts = Path(bench.settings["generate.prompts"])
    moved = prompts.with_name("moved.jsonl")
    moved.write_bytes(prompts.read_bytes())
    assert bench.pipeline(generate__prompts=str(moved))[0].stage("vocab") is None
    moved.write_text('{"id": "a", "turns": ["B?"]}\n')
    assert "conversations was made from other settings or inputs: inputs.prompts: " in bench.refusal(
        "vocab", generate__prompts=str(moved)
    )


def test_an_upstream_that_was_made_anew_is_noticed(bench: Bench) -> None:
    bench.pipeline()[0].stage("vocab")
    changed, _ = bench.pipeline(extract__max_length=64)
    bench.run.write_origin(changed._origin("extract").model_copy(update={"finished": "later"}))
    message = bench.refusal("vocab", extract__max_length=64)
    assert f"{bench.run.path}/vocab was made from other settings or inputs: inputs.extract: " in message


def test_inputs_that_are_not_there_or_not_finished_are_named(bench: Bench, tmp_path: Path) -> None:
    origin = bench.run.origin("extract")
    assert origin is not None
    bench.run.write_origin(origin.model_copy(update={"finished": None}))
    assert "hidden_states is not finished yet. Run `ray-eagle extract` first" in bench.refusal("vocab")
    bench.run.of("extract").delete()
    assert "hidden_states was not made yet. Run `ray-eagle extract` first" in bench.refusal("vocab")


def test_a_run_folder_of_another_target_names_both(bench: Bench, tmp_path: Path) -> None:
    other = tiny_target(tmp_path / "other", seed=1)
    message = bench.refusal("vocab", target__path=str(other))
    assert f"was made with the target {bench.settings['target.path']} (config " in message
    assert f"these settings name {other} (config " in message
    assert "--redo`" in message


def test_a_target_that_moved_is_the_same_target(bench: Bench, tmp_path: Path) -> None:
    bench.pipeline()[0].stage("vocab")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in Path(bench.settings["target.path"]).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert bench.pipeline(target__path=str(copy))[0].stage("vocab") is None
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1}))
    assert "was made with the target" in bench.refusal("vocab", target__path=str(copy))


def test_arithmetic_needs_no_target_and_no_cluster(tmp_path: Path) -> None:
    run = RunFolder.open(str(tmp_path))
    settings = {"baseline_tps": 82.0, "cycle_ms": 30.0}
    pipeline = Pipeline(Config.model_validate({"breakeven": settings}), run, Said())
    outcome = pipeline.stage("breakeven")
    assert outcome is not None
    assert outcome.facts["arithmetic"] == pytest.approx(2.46)
    assert pipeline.stage("breakeven") is None
    other = Pipeline(Config.model_validate({"breakeven": settings | {"cycle_ms": 40.0}}), run, Said())
    with pytest.raises(OriginError, match=r"settings\.cycle_ms: 30\.0 -> 40\.0"):
        other.stage("breakeven")
    kept = run.finished("breakeven"), run.of("breakeven").read_json("breakeven.json")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))  # as a full disk
    try:
        with pytest.raises(OSError, match="too large"):
            other.stage("breakeven", redo=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (run.finished("breakeven"), run.of("breakeven").read_json("breakeven.json")) == kept, (
        "until there is another"
    )
    assert other.stage("breakeven", redo=True) is not None
    assert run.finished("breakeven") != kept[0]


def test_every_stage_but_the_two_views_has_an_origin() -> None:
    assert set(KINDS) == {"breakeven", "probe-given", "generate", "extract", "vocab", "train", "probe"}
