"""Training on Ray Train: resumed equals uninterrupted, workers do not change what is learned, the export is whole."""

import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ray_eagle.drafter.checkpoint import check_drafter, load_drafter
from ray_eagle.errors import CheckpointError, ConfigError, InputError, WorkerError
from ray_eagle.run import RunFolder
from ray_eagle.training.loop import Trainer, TrainJob
from ray_eagle.training.packing import Pack
from ray_eagle.training.schedule import epoch_steps, learning_rate
from tests.ray.pipeline import Watch, pipeline, tiny_config
from tests.ray.training import DETERMINISTIC, assert_close, curve, fresh, train_here, weights
from tests.tiny import tiny_drafter, tiny_shape

pytestmark = pytest.mark.usefixtures("cluster")


def test_the_export_is_whole_and_the_loss_falls(uninterrupted: Path) -> None:
    shape = check_drafter(uninterrupted / "run" / "drafter")
    assert shape.aux_layers == (1, 3, 4) and shape.draft_vocab_size == 100
    rows = [row for row in curve(uninterrupted) if "loss_0" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    tenth = max(1, len(rows) // 5)
    first, last = (sum(r["loss_0"] for r in part) / tenth for part in (rows[:tenth], rows[-tenth:]))
    assert last < first
    validated = [row for row in curve(uninterrupted) if "predicted_acceptance_length" in row]
    assert validated[-1]["step"] == rows[-1]["step"] and all(
        1 <= r["predicted_acceptance_length"] <= 4 for r in validated
    )


def test_a_finished_run_is_not_run_again(uninterrupted: Path, target_folder: Path) -> None:
    config = tiny_config(uninterrupted, target_folder, train=DETERMINISTIC)
    before = weights(uninterrupted)
    watch = Watch()
    assert pipeline(config, watch).stage("train") is None
    assert any("train: done already" in said for said in watch.said)
    run = RunFolder.open(config.run)
    origin = run.origin("train")
    assert origin is not None
    origin.finished = None  # as if the driver had died between training and export
    run.write_origin(origin)
    logged = len(curve(uninterrupted))
    pipeline(config).stage("train")
    assert len(curve(uninterrupted)) == logged
    assert all(torch.equal(before[name], now) for name, now in weights(uninterrupted).items())


def test_any_number_of_workers_learns_the_same(captured: Path, tmp_path: Path, target_folder: Path) -> None:
    """Four packs a step, noise included: one worker with four, two with two, four with one."""
    curves = []
    for workers in (1, 2, 4):
        folder = fresh(captured, tmp_path / str(workers))
        settings = {"workers": workers, "packs_per_step": 4, "epochs": 2, "noise": 0.2}
        config = tiny_config(folder, target_folder, train=settings)
        if workers == 1:
            train_here(config)
        else:
            pipeline(config).stage("train")
        curves.append(curve(folder))
    assert len(curves[0]) > 4
    assert_close(curves[0], curves[1])
    assert_close(curves[0], curves[2])


def test_training_goes_on_from_a_drafter_folder(
    captured: Path, uninterrupted: Path, tmp_path: Path, target_folder: Path
) -> None:
    folder = fresh(captured, tmp_path / "x")
    given = {"drafter": {"path": str(uninterrupted / "run" / "drafter")}}
    shutil.rmtree(folder / "run" / "vocab")
    config = tiny_config(folder, target_folder, train={"epochs": 1, "noise": 0.0}, vocab={"size": 64}, **given)
    run = pipeline(config)
    run.stage("vocab")
    run.stage("train")
    tuned, start = load_drafter(folder / "run" / "drafter"), load_drafter(uninterrupted / "run" / "drafter")
    assert torch.equal(tuned.d2t, start.d2t), "a fine-tune keeps the map that its head rows belong to"
    scratch = next(row for row in curve(uninterrupted) if "loss_0" in row)["loss_0"]
    assert next(row for row in curve(folder) if "loss_0" in row)["loss_0"] < scratch
    assert not torch.equal(tuned.fc.weight, start.fc.weight)


def test_training_goes_on_from_a_drafter_folder_with_another_map(
    captured: Path, uninterrupted: Path, tmp_path: Path, target_folder: Path
) -> None:
    """What the drafter says of the tokens that both maps hold is what it said: only its head rows moved."""
    folder = fresh(captured, tmp_path / "x")
    path = uninterrupted / "run" / "drafter"
    shutil.rmtree(folder / "run" / "vocab")
    sections = {"drafter": {"path": str(path)}, "vocab": {"size": 110, "keep_given": False}}
    config = tiny_config(folder, target_folder, train={"noise": 0.0}, **sections)
    run = pipeline(config)
    run.stage("vocab")
    trainer = Trainer(TrainJob(config, RunFolder.open(config.run), run.facts))
    given = load_drafter(path)
    assert len(trainer.drafter.d2t) == 110 and not torch.equal(trainer.drafter.d2t, given.d2t)
    outputs = torch.randn(3, given.shape.hidden_size)
    logits, before = trainer.drafter.logits(outputs), given.logits(outputs)
    place = {token: i for i, token in enumerate(trainer.drafter.target_ids.tolist())}
    common = [(place[token], i) for i, token in enumerate(given.target_ids.tolist()) if token in place]
    assert len(common) >= 90
    for now, then in common:
        torch.testing.assert_close(logits[:, now], before[:, then])
    trainer.train_step()
    scratch = next(row for row in curve(uninterrupted) if "loss_0" in row)["loss_0"]
    assert trainer.history and trainer.history.rows[0]["loss_0"] < scratch
    other = {"drafter": {"d2t": given.d2t}}
    with pytest.raises(CheckpointError, match="expected the vocabulary map of the run, found another one"):
        trainer.load(other)


def test_the_share_of_the_devices_arithmetic_is_logged_where_its_peak_is_known(
    captured: Path, target_folder: Path
) -> None:
    logged = []
    for peak in (None, 1e-3, 2e-3):
        config = tiny_config(captured, target_folder, train={"peak_tflops": peak})
        trainer = Trainer(TrainJob(config, RunFolder.open(config.run), pipeline(config).facts))
        for _ in range(3):
            trainer.train_step()
        assert trainer.history
        logged.append(trainer.history.rows[-1])
    assert "mfu" not in logged[0], "nobody knows the peak of a CPU"
    operations = [
        row["mfu"] * peak / row["tokens_per_second"] for row, peak in zip(logged[1:], (1e9, 2e9), strict=True)
    ]
    assert operations[0] == pytest.approx(operations[1], rel=0.02) and operations[0] > 1e5


def test_a_missing_tracker_is_said_before_anything_else(
    captured: Path, tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fresh(captured, tmp_path / "x")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "wandb").exists()])
    run = pipeline(tiny_config(folder, target_folder, train={"trackers": ["tensorboard", "wandb"]}))
    with pytest.raises(ConfigError, match=r"pip install 'ray-eagle\[wandb\]'"):
        run.stage("train")
    assert not (folder / "run" / "checkpoints").exists() and curve(folder) == []


def test_a_drafter_for_another_hidden_size_is_refused_before_workers_start(
    captured: Path, tmp_path: Path, target_folder: Path
) -> None:
    from ray_eagle.drafter.checkpoint import save_drafter

    folder = fresh(captured, tmp_path / "x")
    save_drafter(tiny_drafter(tiny_shape(hidden=64)), tmp_path / "other")
    shutil.rmtree(folder / "run" / "vocab")
    run = pipeline(tiny_config(folder, target_folder, drafter={"path": str(tmp_path / "other")}))
    with pytest.raises(CheckpointError, match=r"hidden_size.*expected 32 \(the target's\), found 64"):
        run.stage("vocab")
        run.stage("train")


def test_no_validation_conversation_is_an_error_with_a_way_out(tmp_path: Path, target_folder: Path) -> None:
    run = pipeline(tiny_config(tmp_path, target_folder, generate={"validation_share": 0.0}))
    for stage in ("generate", "extract", "vocab"):
        run.stage(stage)
    with pytest.raises(InputError, match=r"expected validation conversations, found none.*generate\.validation_share"):
        run.stage("train")


def test_saved_and_loaded_equals_going_on(captured: Path, target_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(captured, target_folder, train={"deterministic": True, "noise": 0.1})
    job = TrainJob(config, RunFolder.open(config.run), pipeline(config).facts)
    whole = Trainer(job)
    for _ in range(4):
        whole.train_step()
    half = Trainer(job)
    for _ in range(2):
        half.train_step()
    half.save(tmp_path / "state.pt")
    resumed = Trainer(job)
    resumed.load(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(2):
        resumed.train_step()
    torch.use_deterministic_algorithms(False)
    for (name, one), other in zip(whole.drafter.named_parameters(), resumed.drafter.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_step_that_is_not_finite_changes_nothing_and_names_its_samples(captured: Path, target_folder: Path) -> None:
    config = tiny_config(captured, target_folder)
    trainer = Trainer(TrainJob(config, RunFolder.open(config.run), pipeline(config).facts))
    trainer.train_step()
    before = [p.detach().clone() for p in trainer.drafter.parameters()]
    moments = [s["exp_avg"].clone() for s in trainer.optimizer.state.values()]
    healthy, names = trainer._sent, []

    def poisoned(pack: Pack, index: int) -> tuple[Pack, float]:
        names.extend(pack.names)
        pack, flops = healthy(pack, index)
        pack.aux_TC[0] = float("nan")
        return pack, flops

    trainer._sent = poisoned  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match=r"loss of step 1 is nan, in samples .*ray-eagle verify") as raised:
        trainer.train_step()
    assert names and all(name in str(raised.value) for name in names)
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.drafter.parameters(), strict=True))
    states = trainer.optimizer.state.values()
    assert all(torch.equal(one, s["exp_avg"]) and s["step"] == 1 for one, s in zip(moments, states, strict=True))


def test_every_position_or_those_that_count_learn_the_same(captured: Path, target_folder: Path) -> None:
    drafters = []
    for supervised_only in (True, False):
        config = tiny_config(captured, target_folder, train={"noise": 0.0, "supervised_only": supervised_only})
        trainer = Trainer(TrainJob(config, RunFolder.open(config.run), pipeline(config).facts))
        for _ in range(3):
            trainer.train_step()
        drafters.append(trainer.drafter)
    for (name, one), other in zip(drafters[0].named_parameters(), drafters[1].parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name


def test_every_sample_is_trained_on_once_an_epoch_in_another_order() -> None:
    lengths = [3 + i * 7 % 50 for i in range(83)]
    epochs = [epoch_steps(lengths, 100, 2, seed=1, epoch=e) for e in range(3)]
    for steps in epochs:
        packs = [pack for step in steps for pack in step]
        assert sorted(i for pack in packs for i in pack) == list(range(83))
        assert all(sum(lengths[i] for i in pack) <= 100 for pack in packs)
        assert all(len(step) == 2 for step in steps[:-1])
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[1] == epoch_steps(lengths, 100, 2, seed=1, epoch=1)


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    rates = [learning_rate(s, 200, peak=2.0, floor=0.1, warmup_share=0.05) for s in range(200)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == rates[10] == 2.0
    assert rates[105] == pytest.approx(2.0 * 0.55, rel=0.02) and rates[-1] == pytest.approx(0.2, rel=0.01)
    assert all(a >= b for a, b in pairwise(rates[10:]))
