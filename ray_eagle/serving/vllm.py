"""vLLM: its OpenAI server and Prometheus counters, differenced around each batch.

Not run on hardware by this project: tested on recorded answers. It reads layer ids as the inputs of layers, so it gets a
copy of the drafter's config with each id one higher.
"""

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray_eagle.config import ServeConfig
from ray_eagle.drafter.engines import Engine
from ray_eagle.errors import ConfigError, InputError, ServingError
from ray_eagle.serving.engine import EngineFacts, Speculation, Work
from ray_eagle.serving.passes import Answer
from ray_eagle.serving.server import Get, Models, child_environment, read_event, tensor_parallel
from ray_eagle.serving.streams import Reply

SERVED_NAME = "target"
SAMPLE = re.compile(r"^vllm:(spec_decode_num_\w+?)(?:_total)?(?:\{([^}]*)\})?\s+([0-9.eE+]+)\s*$")


@dataclass(frozen=True)
class Counters:
    """Since the server's start."""

    drafts: int
    """Verify passes."""
    accepted: int
    by_position: dict[int, int]
    """Passes that accepted the draft at this position, 0-based."""

    def since(self, before: "Counters") -> "Counters":
        positions = {i: n - before.by_position.get(i, 0) for i, n in self.by_position.items()}
        return Counters(self.drafts - before.drafts, self.accepted - before.accepted, positions)

    def passes(self) -> list[int]:
        """Accepted drafts of each pass, sorted: a_j passes accepted at least j, so a_j - a_(j+1) accepted exactly j."""
        reached = [self.drafts, *(self.by_position[i] for i in sorted(self.by_position)), 0]
        return [j for j in range(len(reached) - 1) for _ in range(reached[j] - reached[j + 1])]


class VLLM:
    """`Dialect` of vLLM's OpenAI server."""

    name = "vllm"
    essential = "^VLLM::"
    path = "/v1/completions"

    def __init__(self, config: ServeConfig, models: Models) -> None:
        self._config, self._models = config, models
        self._python = config.python or sys.executable

    def environment(self, speculation: Speculation | None = None) -> dict[str, str]:
        return child_environment(self._config)

    def command(self, port: int, speculation: Speculation | None, drafter: Path) -> list[str]:
        config = self._config
        words: dict[str, object | None] = {
            "--model": self._models.target,
            "--served-model-name": SERVED_NAME,
            "--host": "127.0.0.1",
            "--port": port,
            "--tensor-parallel-size": tensor_parallel(config),
            "--dtype": config.dtype,
            "--seed": self._models.seed,
            "--max-num-seqs": config.max_running,
            "--max-model-len": config.context_length,
            "--gpu-memory-utilization": config.memory_share,
        }
        flags = [text for name, value in words.items() if value is not None for text in (name, str(value))]
        flags += ["--no-enable-prefix-caching"]
        flags += ["--trust-remote-code"] if self._models.trust_remote_code else []
        return [
            *(self._python, "-m", "vllm.entrypoints.openai.api_server"),
            *flags,
            *self.flags(speculation, str(drafter)),
            *config.args,
        ]

    def flags(self, speculation: Speculation | None, drafter: str) -> list[str]:
        """Raises ConfigError for trees, part-verified chains and simulated acceptance, which vLLM does not do."""
        if speculation is None:
            return []
        if speculation.topk > 1 or speculation.draft_tokens != speculation.steps + 1:
            raise ConfigError(f"vllm: expected a chain (topk 1, draft_tokens = steps + 1), found {speculation.name}.")
        if speculation.simulated:
            raise ConfigError("vllm: expected no simulated acceptance, which only the sglang engine has.")
        chosen = {"method": "eagle3", "model": drafter, "num_speculative_tokens": speculation.steps}
        return ["--speculative-config", json.dumps(chosen)]

    def reads(self) -> Engine:
        return Engine("vllm")

    def body(self, work: Work) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": SERVED_NAME,
            "prompt": list(work.input_ids),
            "max_tokens": work.max_new_tokens,
            "temperature": work.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "ignore_eos": work.past_end,
            "return_token_ids": True,
            "stream": not work.gaps,
        }
        return body | ({"logprobs": 2} if work.gaps else {})

    def answer(self, reply: Reply) -> Answer:
        tokens: list[int] = []
        counts: list[int] = []
        times: list[float] = []
        reason, gaps = None, None
        for at, payload in reply.events:
            event = read_event("vllm", payload)
            if reply.status != 200:
                raise (InputError if reply.status == 400 else ServingError)(f"vllm: {reply.status}: {payload[:300]!r}")
            try:
                choices = event["choices"]
                new = [token for choice in choices for token in choice["token_ids"] or []]
            except (KeyError, TypeError) as error:
                raise ServingError(
                    f"vllm: expected choices with token_ids, found {payload[:200]!r} ({error!r})."
                ) from None
            if new:
                tokens += new
                counts.append(len(new))
                times.append(at)
            for choice in choices:
                reason = choice.get("finish_reason") or reason
                gaps = _gaps(choice) or gaps
        if not tokens or reason not in ("stop", "length"):
            raise ServingError(f"vllm: the answer broke off after {len(tokens)} tokens ({reason}).")
        return Answer(tokens, counts, times, reply.started, reason == "stop", gaps=gaps)

    def counters(self, get: Get) -> Counters:
        return read_counters(get("/metrics"))

    def counted(
        self, answers: list[Answer], before: Counters, after: Counters, *, speculating: bool, undisturbed: bool
    ) -> list[Answer]:
        """Chunks are believed when there are as many as passes; a single answer falls back on the counters.

        The counters are the whole server's, so with other requests inside they say nothing of these answers. Raises
        ServingError when a server that should speculate drafted nothing, and when passes cannot be told apart.
        """
        if not speculating:
            return answers
        made = after.since(before)
        chunks = [answer.pass_sizes for answer in answers]
        if not made.drafts and any(chunks):
            raise ServingError(
                f"vllm: expected verify passes of {len(answers)} answers in the counters of /metrics, found none: it does not "
                "speculate, or names them otherwise. Look into its log for the drafter, and check its version."
            )
        if not undisturbed or made.drafts == sum(map(len, chunks)):
            return answers
        if len(answers) == 1:
            return [replace(answers[0], accepted=made.passes())]
        raise ServingError(
            f"vllm: {sum(map(len, chunks))} chunks of {len(answers)} answers came from {made.drafts} passes, so which answer "
            "a pass belongs to is not known. Measure acceptance at concurrency 1 (probe.concurrencies)."
        )

    def facts(self, get: Get) -> EngineFacts:
        try:
            version = str(json.loads(get("/version"))["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise ServingError(f"vllm: /version is not understood ({error!r}).") from None
        return EngineFacts(
            name=self.name,
            version=version,
            max_concurrency=self._config.max_running,
            dtype=self._config.dtype,
            device="cuda",
        )


def read_counters(text: str) -> Counters:
    """From Prometheus' text format, summed over engines; with and without the suffix `_total`."""
    sums = {"spec_decode_num_drafts": 0.0, "spec_decode_num_accepted_tokens": 0.0}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if not found:
            continue
        name, labels, value = found.group(1), found.group(2) or "", float(found.group(3))
        at = re.search(r'position="(\d+)"', labels)
        if name == "spec_decode_num_accepted_tokens_per_pos" and at:
            positions[int(at.group(1))] = positions.get(int(at.group(1)), 0.0) + value
        elif name in sums:
            sums[name] += value
    return Counters(
        int(sums["spec_decode_num_drafts"]),
        int(sums["spec_decode_num_accepted_tokens"]),
        {i: int(value) for i, value in positions.items()},
    )


def _gaps(choice: dict[str, Any]) -> list[float] | None:
    """Best less second-best log-probability of each token, where asked for."""
    top = (choice.get("logprobs") or {}).get("top_logprobs")
    if not top:
        return None
    ranked = [sorted(each.values(), reverse=True) for each in top]
    return [two[0] - two[1] if len(two) > 1 else float("inf") for two in ranked]
