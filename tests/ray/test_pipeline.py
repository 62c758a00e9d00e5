"""The whole pipeline through the command line, and the decisions that `run` takes."""

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ray_eagle.drafter.checkpoint import load_drafter
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.probing.predict import predict
from ray_eagle.probing.reports import Breakeven, Probe
from ray_eagle.report.model import Report, build_report
from ray_eagle.run import RunFolder
from ray_eagle.stages import Pipeline
from ray_eagle.target.loading import head_and_embedding
from tests.ray.pipeline import Watch, pipeline, tiny_config
from tests.tiny import tiny_target


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ray_eagle", *words], capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token hangs mostly on the newest one, so that a drafter learns something in seconds."""
    return tiny_target(tmp_path_factory.mktemp("calm") / "target", scale=0.08, seed=3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> tuple[Path, dict[str, Any]]:
    """A run made by `ray-eagle run --json`: its folder, and what was printed."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder, target_folder, train={"epochs": 3, "lr": 3e-3})
    # so small a break-even is noise, and on a busy machine one that no drafter can pass
    config = config.model_copy(update={"train_anyway": True})
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    done = command("run", "-c", str(folder / "run.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    assert "raylet" not in done.stderr and "INFO" not in done.stderr, "Ray's own doings are no news"
    return folder, json.loads(done.stdout)


def opened(folder: Path, target: Path, watch: Watch | None = None, **sections: Any) -> Pipeline:
    return pipeline(tiny_config(folder, target, train={"epochs": 3, "lr": 3e-3}, **sections), watch)


def test_run_prints_the_report_and_writes_the_same(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = finished
    assert json.loads((folder / "run" / "report" / "report.json").read_text()) == printed
    report = Report.model_validate(printed)
    assert report.verdict in ("serve", "fine-tune", "broken", "not-worth-it") and report.reasons
    assert report.acceptance_interval is not None and report.acceptance_length is not None
    low, high = report.acceptance_interval
    assert 1 <= low <= report.acceptance_length <= high <= 4
    assert report.acceptance_length == pytest.approx(1 + sum(report.marginal_acceptance))
    assert sum(report.histogram) == report.verify_passes > 0
    assert report.break_even is not None and report.speedup == pytest.approx(
        report.acceptance_length / report.break_even
    )
    assert report.plain_identical_share == 1.0, "in float32 speculation does not change the text"
    assert set(report.stages) == {"preflight", "breakeven", "generate", "extract", "vocab", "train", "probe"}
    assert all(stage.bytes > 0 for stage in report.stages.values())
    assert report.curves and report.target["path"] and report.versions["ray"]


def test_walk_and_server_agree_pass_by_pass(finished: tuple[Path, dict[str, Any]], target_folder: Path) -> None:
    folder, printed = finished
    run = opened(folder, target_folder)
    drafter = load_drafter(folder / "run" / "drafter")
    head, embedding, _ = head_and_embedding(run.facts)
    predictions = predict(
        drafter,
        HiddenStates(run.run.of("extract"), "held_out"),
        embedding.float(),
        head[drafter.target_ids].float(),
        run.config.probe.steps,
        first_answer=run.config.probe.max_new_tokens,
    )
    served = Probe.model_validate(run.run.of("probe").read_json("probe.json")).served
    walked = {p.source_id: (p.starts, p.accepted) for p in predictions}
    assert len(served.rows) == len(walked) >= 4
    assert {row.id: (row.starts, row.accepted) for row in served.rows} == walked
    assert sum(j for _, accepted in walked.values() for j in accepted) > 0, "some drafts are accepted"
    assert printed["predicted_acceptance_length"] == pytest.approx(printed["acceptance_length"])
    assert printed["predicted_marginal"] == pytest.approx(printed["marginal_acceptance"])


def test_a_second_run_says_what_is_done_and_makes_nothing(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = finished
    before = {p: p.stat().st_mtime_ns for p in (folder / "run").rglob("*.arrow")}
    weights = (folder / "run" / "drafter" / "model.safetensors").stat().st_mtime_ns
    began = time.monotonic()
    done = command("run", "-c", str(folder / "run.yaml"))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    for stage in ("breakeven", "generate", "extract", "vocab", "train", "probe"):
        assert f"{stage}: done already" in done.stderr
    assert f"{printed['acceptance_length']:.3f}" in done.stdout and "Verdict" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in (folder / "run").rglob("*.arrow")} == before
    assert (folder / "run" / "drafter" / "model.safetensors").stat().st_mtime_ns == weights


def test_prediction_without_a_server_judges_any_drafter(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = finished
    words = ["probe", "--from-shards", "-c", str(folder / "run.yaml"), "--json"]
    own = command(*words)
    assert own.returncode == 0, own.stderr
    assert json.loads(own.stdout)["acceptance_length"] == pytest.approx(printed["predicted_acceptance_length"])
    drafter = load_drafter(folder / "run" / "drafter")
    torch.manual_seed(0)
    torch.nn.init.normal_(drafter.lm_head.weight)
    from ray_eagle.drafter.checkpoint import save_drafter

    save_drafter(drafter, folder / "worse")
    worse = command(*words, "--drafter.path", str(folder / "worse"))
    assert worse.returncode == 0, worse.stderr
    assert json.loads(worse.stdout)["acceptance_length"] < printed["predicted_acceptance_length"]


def test_verify_command_tells_whole_from_damaged(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    import shutil

    folder, _ = finished
    assert command("verify", str(folder / "run" / "hidden_states")).returncode == 0
    damaged = tmp_path / "states"
    shutil.copytree(folder / "run" / "hidden_states", damaged)
    shard = sorted(damaged.glob("*.arrow"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    found = command("verify", str(damaged))
    assert found.returncode == 1 and shard.name in found.stdout


def test_run_stops_when_no_drafter_can_pay(tmp_path: Path, target_folder: Path, cluster: None) -> None:
    watch = Watch()
    slow = {"baseline_tps": 100.0, "cycle_ms": 50.0}
    run = pipeline(tiny_config(tmp_path, target_folder, breakeven=slow), watch)
    report = run.all()
    assert report.verdict == "not-worth-it" and report.break_even == pytest.approx(5.0)
    assert any("no drafter can pay here" in said for said in watch.said)
    assert run.run.origin("generate") is None


def test_run_stops_when_the_given_drafter_pays_and_goes_on_when_told(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, target_folder: Path, cluster: None
) -> None:
    folder, _ = finished
    settings = {
        "drafter": {"path": str(folder / "run" / "drafter")},
        "breakeven": {"baseline_tps": 82.0, "cycle_ms": 30.0},
    }
    watch = Watch()
    run = pipeline(tiny_config(tmp_path, target_folder, **settings), watch)
    run.stage("breakeven")
    given = run._origin("probe-given")
    given.finished = datetime.now(UTC).isoformat()
    probe = Probe.model_validate(RunFolder.open(str(folder / "run")).of("probe").read_json("probe.json"))
    paying = probe.model_copy(update={"served": probe.served.model_copy(update={"verdict": "serve"})})
    run.run.write_origin(given)
    run.run.of("probe-given").write_json("probe.json", paying.model_dump())
    report = run.all()
    assert report.verdict == "serve" and report.drafter == settings["drafter"]["path"]
    assert any("pays already" in said and "3 draft steps" in said for said in watch.said)
    assert run.run.origin("generate") is None

    class Reached(Exception):
        pass

    def reached(task: str, amount: float) -> None:
        raise Reached

    anyway = run.config.model_copy(update={"train_anyway": True})
    with pytest.raises(Reached):
        Pipeline(anyway, run.run, Watch(reached)).all()


def test_founding_arithmetic(tmp_path: Path) -> None:
    done = command("breakeven", "--preset", "kimi-k2.5", "--run", str(tmp_path))
    assert done.returncode == 0 and "2.46" in done.stderr
    found = Breakeven.model_validate_json((tmp_path / "probes" / "breakeven" / "breakeven.json").read_text())
    assert found.arithmetic == pytest.approx(2.46)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["extract", "--run", "RUN", "--target.path", "/nowhere"], 1, "no target: /nowhere: expected a folder with config.json, found nothing"),
        (["extract"], 2, "no run folder"),
        (["extract", "--run", "RUN", "--train.epoch", "3"], 2, "unknown setting 'train.epoch'. Did you mean 'train.epochs'?"),
        (["extract", "--run", "relative", "--in-job"], 2, "Expected an absolute path or a URI"),
        (["vocab", "--run", "RUN", "--target.path", "TARGET"], 1, "was not made yet. Run `ray-eagle extract` first"),
        (["generate", "--run", "RUN", "--target.path", "TARGET", "--generate.prompts", "/none.jsonl"], 1, "prompts file /none.jsonl cannot be read"),
        (["probe", "--address", "http://127.0.0.1:9", "--run", "RUN"], 2, "bash cluster/local.sh start"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_message_and_the_right_code(
    words: list[str], code: int, message: str, tmp_path: Path, target_folder: Path
) -> None:
    places = {"RUN": str(tmp_path / "run"), "TARGET": str(target_folder)}
    done = command(*[places.get(word, word) for word in words])
    assert done.returncode == code, done.stderr
    assert message in done.stderr and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.stdout == ""


def test_report_of_an_empty_run_says_what_to_do(tmp_path: Path, target_folder: Path) -> None:
    run = pipeline(tiny_config(tmp_path, target_folder))
    with pytest.raises(Exception, match="Run `ray-eagle run` first"):
        build_report(run.config, run.run)
