"""The pipeline: which stage reads what, when one is done, and what `run` decides on the way.

What works is imported where it is called: torch, transformers and Ray Serve take seconds to import, and no stage needs all of
them.
"""

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ray_eagle.config import Config
from ray_eagle.conversations.inputs import source_hash
from ray_eagle.conversations.prompts import prompts_hash
from ray_eagle.errors import InputError, LockedError, OriginError
from ray_eagle.lock import refuse_if_locked
from ray_eagle.probing.arithmetic import compute
from ray_eagle.probing.reports import Breakeven, Probe
from ray_eagle.progress import Progress
from ray_eagle.report.model import Report, build_report, to_json
from ray_eagle.run import CHECKPOINTS, LOGS, Origin, RunFolder, content_hash, differences
from ray_eagle.settings import absolute_paths
from ray_eagle.stage import Outcome, versions

if TYPE_CHECKING:
    from ray_eagle.target.loading import TargetFacts

ORDER = ("preflight", "breakeven", "probe-given", "generate", "extract", "vocab", "train", "probe", "report")
MACHINE_ONLY = frozenset(
    {"actors", "cpus", "gpus", "workers", "cpus_per_worker", "report_every", "max_failures", "keep_checkpoints"}
    | {"min_workers", "trackers", "peak_tflops"}
    | {"host", "port", "token", "start_s", "hang_s", "python", "env", "url", "stages", "split", "share"}
    | {"urls", "api_key_env", "in_flight", "tries", "timeout_s", "server_wait_s"}
)
"""Settings that decide where and how fast, not what: changing them redoes nothing."""

SPEED = frozenset({("serve", "cpus"), ("serve", "gpus"), ("serve", "env"), ("serve", "python"), ("probe", "url")})
"""... but where and with what a server runs decides what a probe measures."""
REPLACED = frozenset({("serve", "steps"), ("serve", "topk"), ("serve", "draft_tokens")})
"""A probe sets these itself, from settings of its own."""
HASHED = frozenset({("generate", "prompts"), ("probe", "prompts"), ("drafter", "path")})
"""Files: their content is an input, not their place."""


@dataclass(frozen=True)
class Kind:
    """What a stage is made from."""

    sections: tuple[str, ...]
    """Groups of settings that decide its content."""
    upstream: tuple[str, ...] = ()
    """Stages whose artifacts it reads."""
    prompts: bool = False
    """Reads the prompts file."""
    given: bool = False
    """Reads the given drafter."""
    on_cluster: bool = False
    """Joins the cluster before it starts; `generate` does so itself, when it has read the prompts."""


KINDS = {
    "breakeven": Kind(("breakeven", "drafter", "vocab", "serve"), prompts=True, given=True, on_cluster=True),
    "probe-given": Kind(("probe", "serve"), prompts=True, given=True, on_cluster=True),
    "generate": Kind(("generate",), prompts=True),
    "extract": Kind(("extract",), ("generate",), on_cluster=True),
    "vocab": Kind(("vocab",), ("extract",), given=True),
    "train": Kind(("train", "drafter"), ("extract", "vocab"), given=True, on_cluster=True),
    "probe": Kind(("probe", "serve"), ("train",), prompts=True, on_cluster=True),
}

AT_ONCE = {"breakeven": "breakeven.json", "probe-given": "probe.json", "probe": "probe.json"}
"""They write one file at their end: a result that is redone stays until there is another."""


class Pipeline:
    """One run: its settings, its folder, and the target's facts."""

    def __init__(self, config: Config, run: RunFolder, progress: Progress) -> None:
        self.config, self.run, self.progress = absolute_paths(config), run, progress
        self._facts: TargetFacts | None = None

    @property
    def facts(self) -> "TargetFacts":
        """Read from the target's files at first use. Raises TargetError."""
        if self._facts is None:
            from ray_eagle.target.loading import read_facts

            self._facts = read_facts(self.config.target)
        return self._facts

    def connect(self) -> None:
        """Join the cluster that the settings name."""
        from ray_eagle.cluster import connect

        connect(self.config.ray)

    def stage(self, name: str, *, redo: bool = False) -> Outcome | None:
        """Run one stage, or say that it is done already (None). Raises OriginError when its folder was made otherwise."""
        if name == "preflight":
            return self._preflight()
        if name == "report":
            return self._report()
        wanted = self._origin(name)
        replacing = redo and name in AT_ONCE and self.run.finished(name) is not None
        if redo and not replacing:
            self._discard(name)
        found = None if replacing else self.run.origin(name)
        if found and found.key != wanted.key:
            if not self._nothing_made(name):
                raise OriginError(self._mismatch(name, found, wanted))
            found = None
        if found and found.finished:
            self.progress.say(f"{name}: done already ({found.finished}, {found.seconds:.0f} s)")
            return None
        wanted.seconds = found.seconds if found else 0.0
        if not replacing:
            self.run.of(name).create()
            self.run.write_origin(wanted)
        if KINDS[name].on_cluster and not self._arithmetic_only(name):
            self.connect()
        began = time.monotonic() - wanted.seconds
        try:
            outcome = self._call(name)
        except BaseException as error:
            wanted.seconds = round(time.monotonic() - began, 2)
            if not replacing and not isinstance(error, LockedError):  # then the folder is another driver's
                with suppress(OSError):
                    self.run.write_origin(wanted)
            raise
        wanted.seconds = round(time.monotonic() - began, 2)
        wanted.bytes = self.run.of(name).size()
        wanted.samples, wanted.tokens = outcome.samples, outcome.tokens
        wanted.finished = datetime.now(UTC).isoformat(timespec="seconds")
        wanted.content = self._content(name)
        wanted.versions = versions()
        self.run.write_origin(wanted)
        self.progress.say(f"{name}: done in {wanted.seconds:.0f} s")
        return outcome

    def facts_of(self, name: str) -> dict[str, Any]:
        """What a finished stage said, where its folder holds just that; else nothing."""
        return dict(self.run.of(name).read_json(AT_ONCE[name])) if name in AT_ONCE else {}

    def all(self, *, redo: str | None = None) -> Report:
        """Every stage in order, skipping what is done, with the decisions of the design. Returns the report."""
        later = ORDER[ORDER.index(redo) :] if redo else ()
        for name in ORDER[:-1]:
            if name == "probe-given" and not self.config.drafter.path:
                continue
            if name == "preflight" and self._everything_done() and not redo:
                continue
            self.stage(name, redo=name in later and name in KINDS)
            stop = self._decide(name)
            if stop and not self.config.train_anyway:
                self.progress.say(stop)
                break
            if stop:
                self.progress.say(f"{stop} Going on all the same (train_anyway).")
        self.stage("report")
        return build_report(self.config, self.run)

    def _decide(self, name: str) -> str | None:
        """Why the run should stop after this stage; None to go on."""
        if name == "breakeven":
            found = Breakeven.model_validate(self.run.of(name).read_json("breakeven.json"))
            if found.measured and not any(row.can_pay for row in found.measured.rows):
                return "run: break-even is steps + 1 or more at every setting, so no drafter can pay here: stopping."
            if found.arithmetic and found.arithmetic >= self.config.probe.steps + 1:
                return (
                    f"run: break-even {found.arithmetic:.2f} is beyond {self.config.probe.steps + 1}, the most that "
                    f"{self.config.probe.steps} draft steps can reach: no drafter can pay here, stopping."
                )
        if name == "probe-given":
            served = Probe.model_validate(self.run.of(name).read_json("probe.json")).served
            if served.verdict == "serve":
                return (
                    f"run: the given drafter pays already ({served.acceptance.acceptance_length:.2f} against "
                    f"{served.break_even:.2f}): serve {self.config.drafter.path} with {served.steps} draft steps. "
                    "Stopping; --train-anyway goes on."
                )
        return None

    def _everything_done(self) -> bool:
        names = [n for n in KINDS if n != "probe-given" or self.config.drafter.path]
        return all(self.run.finished(name) for name in names)

    def _call(self, name: str) -> Outcome:
        if self._arithmetic_only(name):
            return compute(self.config, self.run, self.progress)
        if name in ("breakeven", "probe-given", "probe"):
            from ray_eagle.probing.stage import breakeven, probe

            if name == "breakeven":
                return breakeven(self.config, self.run, self.facts, self.progress)
            return probe(self.config, self.run, self.facts, self.progress, stage=name)
        work: Callable[[Config, RunFolder, TargetFacts, Progress], Outcome]
        if name == "generate":
            from ray_eagle.conversations.generate import generate as work
        elif name == "extract":
            from ray_eagle.hidden_states.extract import extract as work
        elif name == "vocab":
            from ray_eagle.vocab import vocab as work
        else:
            from ray_eagle.training.train import train as work
        return work(self.config, self.run, self.facts, self.progress)

    def _arithmetic_only(self, name: str) -> bool:
        return name == "breakeven" and self.config.breakeven.baseline_tps is not None

    def _origin(self, name: str) -> Origin:
        """What the stage would be made from now. Raises OriginError when an input is not there."""
        kind = KINDS[name]
        if self._arithmetic_only(name):
            return Origin(stage=name, settings=self.config.breakeven.model_dump(mode="json"), inputs={}, target={})
        settings: dict[str, Any] = {section: deciding(self.config, section) for section in kind.sections}
        if self.config.states.path and name in (
            "generate",
            "extract",
        ):  # by its place: it may be deleted once it is imported
            settings["states"] = deciding(self.config, "states")
        settings["seed"] = self.config.seed
        settings["target"] = {
            "dtype": self.config.target.dtype,
            "attention": self.config.target.attention,
            "aux_layers": list(self.facts.aux_layers),
        }
        inputs = {upstream: self.run.input_key(upstream) for upstream in kind.upstream}
        for upstream in kind.upstream:
            self.check_current(upstream, reader=name)
        if kind.prompts:
            inputs["prompts"] = prompts_hash(self.config.generate)
            if name.startswith("probe") and self.config.probe.prompts:
                inputs["probe.prompts"] = source_hash(self.config.probe.prompts)
        if kind.given and self.config.drafter.path:
            inputs["drafter"] = _drafter_hash(self.config.drafter.path)
        return Origin(
            stage=name,
            settings=settings,
            inputs=inputs,
            target=self.facts.fingerprint,
            target_path=str(self.facts.path),
        )

    def check_current(self, upstream: str, *, reader: str) -> None:
        """An input made from other settings than the ones in use now must not be read silently."""
        found, wanted = self.run.origin(upstream), self._origin(upstream)
        if found and found.key != wanted.key:
            raise OriginError(
                f"{reader}: its input does not belong to these settings. " + self._mismatch(upstream, found, wanted)
            )

    def _mismatch(self, name: str, found: Origin, wanted: Origin) -> str:
        folder = self.run.of(name).path
        way_out = f"Use another run folder (--run), or redo it: `ray-eagle {name.removesuffix('-given')} --redo`."
        if found.target != wanted.target:
            return (
                f"{folder} was made with the target {found.target_path} ({_short(found.target)}), these settings name "
                f"{wanted.target_path} ({_short(wanted.target)}). {way_out}"
            )
        return f"{folder} was made from other settings or inputs: {'; '.join(differences(found, wanted))}. {way_out}"

    def _content(self, name: str) -> str:
        """Hash of the artifact as its readers see it; empty for a stage that none reads."""
        folder = self.run.of(name)
        if name == "generate":
            parts = [part for part in folder.names() if part.startswith("part-")]
            return content_hash([hashlib.blake2b(folder.read_bytes(part)).hexdigest() for part in parts])
        if name == "extract":
            from ray_eagle.hidden_states.dataset import read_plan, read_records

            return content_hash([record.checksum for record in read_records(folder, read_plan(folder)).values()])
        files = {"vocab": ["vocab.safetensors"], "train": ["config.json", "model.safetensors"]}.get(name, [])
        return content_hash([hashlib.blake2b(folder.read_bytes(file)).hexdigest() for file in files]) if files else ""

    def _discard(self, name: str) -> None:
        """Remove what a stage made; the origin goes last, so what an interrupted redo leaves is not taken for a new one's."""
        refuse_if_locked(self.run.folder(CHECKPOINTS) if name == "train" else self.run.of(name))
        with suppress(InputError):  # a damaged one
            if found := self.run.origin(name):
                self.run.write_origin(found.model_copy(update={"finished": None}))
        if name == "train":
            self.run.folder(CHECKPOINTS).delete()
            self.run.folder(LOGS).delete()
        self.run.of(name).delete(last="origin.json")

    def _nothing_made(self, name: str) -> bool:
        """A stage that failed before it wrote anything leaves only its origin, and a dead driver's lock: they bind nobody."""
        folder = self.run.of(name)
        lock = refuse_if_locked(folder) or b""
        empty = folder.size() == len(folder.read_bytes("origin.json")) + len(lock)
        return empty and not (name == "train" and self.run.folder(CHECKPOINTS).exists())

    def _preflight(self) -> Outcome:
        """Check everything that can be checked now. Raises InputError that names each error with its way out."""
        from ray_eagle.preflight.checks import run_checks

        self.connect()
        began = time.monotonic()
        report = run_checks(self.config, self.run, connected=True)
        folder = self.run.of("preflight")
        folder.write_json("preflight.json", report.model_dump(mode="json"))
        for finding in report.findings:
            if finding.level == "warning" or (finding.level == "ok" and finding.check == "cost"):  # errors are raised
                level = "" if finding.level == "ok" else f"{finding.level}: "
                self.progress.say(f"preflight: {level}{finding.check}: {finding.message} {finding.fix}".rstrip())
        self.run.write_origin(
            Origin(
                stage="preflight",
                settings={},
                inputs={},
                target={},
                seconds=round(time.monotonic() - began, 2),
                bytes=folder.size(),
                finished=datetime.now(UTC).isoformat(timespec="seconds") if report.ok else None,
            )
        )
        if not report.ok:
            wrong = [f"{f.check}: {f.message} {f.fix}".rstrip() for f in report.findings if f.level == "error"]
            raise InputError(
                "preflight found " + f"{len(wrong)} error{'s' if len(wrong) > 1 else ''}:\n  " + "\n  ".join(wrong)
            )
        self.progress.say(f"preflight: {len(report.findings)} findings, none of them an error")
        return Outcome(facts=report.model_dump(mode="json"))

    def _report(self) -> Outcome:
        report = build_report(self.config, self.run)
        self.run.of("report").write_json("report.json", to_json(report))
        return Outcome(facts=to_json(report))


def deciding(config: Config, section: str) -> dict[str, Any]:
    """The settings of a group that decide what a stage makes, by name."""
    values = getattr(config, section).model_dump(mode="json").items()
    elsewhere = HASHED | REPLACED
    return {
        key: value
        for key, value in values
        if (section, key) in SPEED or (key not in MACHINE_ONLY and (section, key) not in elsewhere)
    }


def copy_config(config: Config, run: RunFolder) -> None:
    """Keep the effective settings of the latest command beside its artifacts, without the token."""
    run.create()
    settings = config.model_dump(mode="json", exclude={"serve": {"token"}})
    run.write_bytes("run.yaml", yaml.safe_dump(settings, sort_keys=False).encode())


def _short(target: dict[str, str]) -> str:
    return f"config {target.get('config', 'absent')[:8]}, weights {target.get('weights', 'absent')[:8]}"


def _drafter_hash(path: str) -> str:
    """Hash of the drafter's config and the head of its weights."""
    from ray_eagle.drafter.checkpoint import read_shape
    from ray_eagle.target.loading import fingerprint

    folder = Path(path).expanduser()
    read_shape(folder)  # a missing folder or config is explained here
    return content_hash(fingerprint(folder))
