"""All checks of a run in order. Nothing here raises: what is wrong becomes a finding."""

import os
from collections.abc import Callable

import torch

from ray_eagle import cluster, stage
from ray_eagle.config import Config
from ray_eagle.conversations.inputs import count_rows
from ray_eagle.conversations.states import look_at_files
from ray_eagle.errors import EagleError
from ray_eagle.preflight import artifacts, machine, servers
from ray_eagle.preflight.estimate import estimate_run, human_bytes
from ray_eagle.preflight.gpus import check_gpus
from ray_eagle.preflight.kernels import check_kernels
from ray_eagle.preflight.node import LOOK_S, NodeFacts, look
from ray_eagle.preflight.report import Estimate, Finding, PreflightReport
from ray_eagle.run import RunFolder
from ray_eagle.target.loading import TargetFacts, choose_dtype, read_facts


def run_checks(config: Config, run: RunFolder, connected: bool) -> PreflightReport:
    """Check target, drafter, machine and, when `connected` to a cluster, what its nodes see; estimate the cost.

    Everything that is wrong, even in reading what is to be checked, is a finding.
    """
    return _Checks(config, run, connected).report()


FIXES = {
    "target": "Check target.path, and copy config.json again.",
    "tokenizer": "Copy its files again, or use the instruct model (own code needs target.trust_remote_code).",
}
"""Ways out of errors of other libraries, which name none."""


class _Checks:
    def __init__(self, config: Config, run: RunFolder, connected: bool) -> None:
        self.config, self.run, self.connected = config, run, connected
        self.findings: list[Finding] = []
        self.facts: TargetFacts | None = None
        self.weights: artifacts.Weights | None = None
        self.estimate: Estimate | None = None
        self.nodes = 1
        self._source = "states" if config.states.path else "prompts"
        """What the run learns from."""

    def report(self) -> PreflightReport:
        config = self.config
        self._guard("target", self._target)
        self._guard("dtype", lambda: artifacts.check_dtypes(config))
        facts = self.facts
        if facts:
            self._guard("target weights", self._weights)
            self._guard("tokenizer", lambda: artifacts.check_tokenizer(facts, config.target))
            if path := config.drafter.path:
                self._guard("drafter", lambda: artifacts.check_given_drafter(path, facts))
            if config.generate.backend != "embedded" and not self.run.finished("generate"):
                self._guard("servers", lambda: servers.check_servers(config.generate, facts))
        self._guard("environment", lambda: machine.check_environment(os.environ))
        self._guard("port", lambda: machine.check_port(config.serve))
        self._guard("GPUs", self._nodes)
        self._guard("CPUs", self._cpus)
        self._guard("host memory", self._memory)
        self._guard(self._source, self._cost)
        if not self.estimate:
            self._guard("cost", self._no_cost)
        self._guard("disk", self._disk)
        if self.connected:
            self._guard("run folder", self._visible)
        return PreflightReport(findings=tuple(self.findings), estimate=self.estimate)

    def _guard(self, check: str, look: Callable[[], list[Finding]]) -> None:
        try:
            self.findings += look()
        except EagleError as error:
            complete = str(error).endswith(".")  # it ends with the way out, unless it quotes another library
            fix = "" if complete else FIXES.get(check, "")
            self.findings.append(Finding(level="error", check=check, message=str(error), fix=fix))
        except Exception as error:  # a file that its reader did not foresee must not hide the other checks
            message = f"{check}: unexpected {type(error).__name__}: {error}"
            fix = FIXES.get(check, f"Check what the settings name for {check}.")
            self.findings.append(Finding(level="error", check=check, message=message, fix=fix))

    def _target(self) -> list[Finding]:
        self.facts = facts = read_facts(self.config.target)
        message = (
            f"{facts.path}: {facts.model_type}, context {facts.max_position_embeddings}, captures {facts.aux_layers}."
        )
        return [Finding(level="ok", check="target", message=message)]

    def _weights(self) -> list[Finding]:
        assert self.facts
        findings, self.weights = artifacts.check_weights(self.facts)
        return findings

    def _nodes(self) -> list[Finding]:
        """GPUs and who is on them, kernels, versions and temporary disk of every node."""
        asked, stages = machine.gpu_demand(self.config)
        serve, here = (
            self.config.serve,
            any(each != "serve" or self.config.serve.engine == "reference" for each in stages),
        )
        if self.connected:
            answers = cluster.on_every_node(look, cluster.live_jobs(), serve, here, timeout_s=LOOK_S)
        else:
            answers = [cluster.NodeAnswer("", look(frozenset(), serve, here))]
        self.nodes = len(answers)
        findings = [
            Finding(
                level="warning", check="GPUs", message=f"{a.node}: {a.error}.", fix="Check that ray_eagle runs there."
            )
            for a in answers
            if a.error
        ]
        nodes: dict[str, NodeFacts] = {a.node: a.value for a in answers if not a.error}
        findings += check_gpus({name: node.gpus for name, node in nodes.items()}, asked, stages)
        for name, node in nodes.items():
            found = {gpu.reading.capability: gpu.reading.name for gpu in node.gpus.gpus}
            for facts in node.kernels:
                findings += check_kernels(f"{name}: " if name else "", facts, found, node.gpus.driver.cuda)
        versions = {"": stage.versions()} | {name: node.versions for name, node in nodes.items()}
        free = {name or "here": node.free_bytes for name, node in nodes.items()}
        return findings + machine.check_nodes(free, versions, self.config.preflight.min_free_gib)

    def _cpus(self) -> list[Finding]:
        threads = machine.cpu_threads()
        logical = cluster.total("CPU") if self.connected else self.config.ray.num_cpus or max(4, os.cpu_count() or 1)
        return machine.check_cpus(*machine.cpu_demand(self.config), logical, threads)

    def _memory(self) -> list[Finding]:
        if not self.weights:
            return []
        generate, extract = self.config.generate, self.config.extract
        stages = ((generate.copies, generate.gpus), (extract.actors, extract.gpus))
        copies = max([1, *(copies for copies, gpus in stages if gpus == 0)])
        device = torch.device("cuda" if self.config.extract.gpus else "cpu")
        loaded = self.weights.loaded_bytes(choose_dtype(self.config.target.dtype, device))
        return machine.check_memory(loaded, copies, machine.available_memory(), here=self.nodes == 1)

    def _cost(self) -> list[Finding]:
        extract, done = self.config.extract, self.run.finished("generate")
        length: float = self.config.preflight.tokens_per_sample
        share = self.config.preflight.supervised_share
        if done:
            samples, what = done.samples, f"{done.samples} conversations"
            length = done.tokens / done.samples if done.samples and done.tokens else length
        elif self.config.states.path:
            if not self.facts:
                return []
            found = look_at_files(self.config, self.facts)
            samples, what = found.samples, f"{found.samples} of {found.files} files of hidden states can be used"
            length, share = found.tokens_per_sample, found.supervised_share
        else:
            samples = count_rows(self.config.generate.prompts, self.config.generate.limit)
            what = f"{samples} prompts"
        if not self.facts:
            return []
        self.estimate = estimate = estimate_run(
            hidden_size=self.facts.hidden_size,
            samples=samples,
            tokens_per_sample=min(length, extract.max_length),
            supervised_share=share,
            state_dtype=extract.state_dtype,
            weights_bytes=self.weights.bytes if self.weights else 0,
        )
        message = (
            f"{what}, about {estimate.tokens} tokens: {human_bytes(estimate.hidden_state_bytes)} of hidden states."
        )
        return [Finding(level="ok", check="cost", message=message)]

    def _no_cost(self) -> list[Finding]:
        wrong = {finding.check for finding in self.findings if finding.level == "error"}
        because = " and the ".join(check for check in ("target", self._source) if check in wrong)
        message = f"the bytes of the hidden states could not be estimated because of the {because}."
        return [Finding(level="warning", check="cost", message=message, fix="Correct that first.")]

    def _disk(self) -> list[Finding]:
        needed = None
        if self.estimate:
            needed = max(0, self.estimate.hidden_state_bytes - self.run.of("extract").size())
        return machine.check_disk(self.run, needed, self.config.preflight.min_free_gib)

    def _visible(self) -> list[Finding]:
        cluster.visible_everywhere(self.run)
        return [
            Finding(level="ok", check="run folder", message=f"{self.run.path} is seen by every node ({self.nodes}).")
        ]
