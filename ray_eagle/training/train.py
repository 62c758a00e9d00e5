"""Stage `train`: a Ray Train run over the hidden states, then the best checkpoint exported as a drafter folder."""

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray_eagle.cluster import ensure_resources, marked
from ray_eagle.config import Config
from ray_eagle.drafter.checkpoint import check_drafter, save_drafter
from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.start import start_drafter
from ray_eagle.errors import InputError, WorkerError
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.lock import Lock
from ray_eagle.progress import Progress
from ray_eagle.run import CHECKPOINTS, LOGS, Folder, RunFolder
from ray_eagle.stage import Outcome
from ray_eagle.target.loading import TargetFacts
from ray_eagle.training.checkpoints import SCORE, Checkpoints
from ray_eagle.training.loop import TrainJob, train_loop
from ray_eagle.training.trackers import HISTORY, check_trackers
from ray_eagle.vocab import read_map


def train(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress) -> Outcome:
    """Train (or go on from the last checkpoint), keep the best by predicted acceptance length, export it."""
    settings = config.train
    # every complaint about settings and inputs before workers start
    check_trackers(settings.trackers)
    d2t, t2d = read_map(run.of("vocab"))
    drafter = start_drafter(config.drafter, facts, d2t, t2d, config.seed, reindex=not config.vocab.keep_given)
    supervised = _supervised_tokens(run)
    folder = run.folder(CHECKPOINTS)
    checkpoints = Checkpoints(folder)
    with Lock(folder):
        _fit(TrainJob(config, run, facts), checkpoints, progress)
    best = checkpoints.best(progress.say)
    if best is None:
        raise WorkerError("train: the run ended without a checkpoint. See logs/ in the run folder.")
    metrics = {**best.figures, "step": float(best.step)}
    drafter.load_state_dict(checkpoints.load(best, "cpu")["drafter"])
    export(drafter, run.of("train"))
    run.of("train").write_json("training.json", {"best": metrics, "history": run.folder(LOGS).read_jsonl(HISTORY)})
    progress.say(
        f"train: best checkpoint at step {metrics['step']:.0f}, predicted acceptance length "
        f"{metrics[SCORE]:.3f} on validation conversations; exported to {run.of('train').path}"
    )
    return Outcome(
        samples=len(HiddenStates(run.of("extract"), "train")), tokens=supervised * settings.epochs, facts=metrics
    )


def _fit(job: TrainJob, checkpoints: Checkpoints, progress: Progress) -> None:
    """Run the workers to the end, from the newest checkpoint."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    settings, folder = job.config.train, checkpoints.folder
    found = checkpoints.newest(progress.say)
    if found:
        progress.say(f"train: going on from the checkpoint of step {found.step}")
    fewest = settings.min_workers or settings.workers
    bundle = {"CPU": settings.cpus_per_worker, "GPU": float(settings.use_gpu)}
    ensure_resources(bundle, fewest, job.config.ray.wait_s)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="nccl" if settings.use_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=settings.workers if fewest == settings.workers else (fewest, settings.workers),
            use_gpu=settings.use_gpu,
            resources_per_worker={k: v for k, v in bundle.items() if v},
        ),
        run_config=ray.train.RunConfig(
            # of its own, so that Ray takes up no earlier run's state: which checkpoint to go on from is told by our records
            name=checkpoints.new_attempt(),
            storage_path=folder.path,
            storage_filesystem=folder.fs,
            worker_runtime_env=marked(settings.use_gpu).get("runtime_env"),
            failure_config=ray.train.FailureConfig(max_failures=settings.max_failures),
            # all: the records decide which to remove
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=None),
        ),
    )
    with _Follow(job.run, progress, found.step if found else 0), _interrupts_as_before():
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise WorkerError(f"train: {_cause(error)}") from error


@contextmanager
def _interrupts_as_before() -> Iterator[None]:
    """Ray Train makes a SystemExit of Ctrl-C, and leaves its handler behind: the stages after it would not stop any more."""
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if in_main:
            signal.signal(signal.SIGINT, handler)


def export(drafter: Drafter, folder: Folder) -> None:
    """Write the SGLang folder, every key and shape checked, to any filesystem."""
    with tempfile.TemporaryDirectory() as temporary:
        save_drafter(drafter, Path(temporary))
        check_drafter(Path(temporary))
        for name in ("model.safetensors", "config.json"):
            folder.write_bytes(name, (Path(temporary) / name).read_bytes())


def _supervised_tokens(run: RunFolder) -> int:
    states = HiddenStates(run.of("extract"), "train")
    if not len(states):
        raise InputError(
            f"{run.of('extract').path}: expected training conversations, found none. Lower generate.held_out_share."
        )
    if not len(HiddenStates(run.of("extract"), "validation")):
        raise InputError(
            f"{run.of('extract').path}: expected validation conversations, found none: nothing could choose the best "
            "checkpoint. Raise generate.validation_share or add prompts."
        )
    return sum(r.supervised_tokens for i, r in states.records.items() if states.plan.units[i].split == "train")


def _cause(error: Any) -> str:
    failures = getattr(error, "worker_failures", None) or {}
    for rank, failure in failures.items():
        cause = getattr(failure, "cause", failure)
        way_out = ". Make room or allow it there: the same command goes on from the last checkpoint."
        return f"worker {rank} failed: {cause}{way_out if isinstance(cause, OSError) else ''}"
    return str(error)


class _Follow:
    """Shows the workers' history file as progress while the trainer blocks; `done` steps were made by an earlier run."""

    def __init__(self, run: RunFolder, progress: Progress, done: int) -> None:
        self.folder = run.folder(LOGS)
        self.progress = progress
        self.done = float(done)
        self.started = False
        self.seen: object = None
        """Stamp of the file when it was read last."""
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        if self.folder.exists(HISTORY):  # rows after the checkpoint are made again
            rows = [row for row in self.folder.read_jsonl(HISTORY) if row["step"] <= self.done]
            self.folder.write_jsonl(HISTORY, rows)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self._show()

    def _watch(self) -> None:
        while not self.stop.wait(0.5):
            self._show()

    def _show(self) -> None:
        stamp = self.folder.stamp(HISTORY)  # before it is read: what comes meanwhile is seen the next time
        if stamp in (None, self.seen):
            return
        self.seen = stamp
        rows = self.folder.read_jsonl(HISTORY)
        if not rows:
            return
        if not self.started:
            self.progress.start("train", rows[-1]["steps"], "steps", done=self.done)
            self.started = True
        latest: dict[str, float] = {}
        for row in rows:
            latest |= row
        if latest["step"] > self.done:
            self.progress.advance(latest["step"] - self.done, _note(latest))
            self.done = latest["step"]


def _note(row: dict[str, float]) -> str:
    parts = [f"epoch {row['epoch']}"]
    if "loss_0" in row:
        parts += [
            f"loss {row['loss_0']:.2f}",
            f"accuracy {row['accuracy_0']:.2f}",
            f"{row['tokens_per_second']:,.0f} tok/s",
        ]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.0%}")
    if SCORE in row:
        parts.append(f"predicted length {row[SCORE]:.2f}")
    return ", ".join(parts)
