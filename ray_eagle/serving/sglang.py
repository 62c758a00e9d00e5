"""SGLang: flags, requests and answers, as releases 0.5.17 to 0.5.23 have them (`ray_eagle.serving.versions`)."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ray_eagle.config import ServeConfig
from ray_eagle.drafter.engines import Engine
from ray_eagle.errors import ConfigError, InputError, ServingError, explain
from ray_eagle.serving.engine import EngineFacts, Speculation, Work
from ray_eagle.serving.passes import Answer
from ray_eagle.serving.server import Get, Models, child_environment, read_event, tensor_parallel
from ray_eagle.serving.streams import Reply
from ray_eagle.serving.versions import release_of

VERSION_S = 60.0
ASK_VERSION = "import importlib.metadata, sys; sys.stdout.write(importlib.metadata.version('sglang'))"


class SGLang:
    """`Dialect` of SGLang's own server."""

    name = "sglang"
    essential = "^sglang::"
    path = "/generate"

    def __init__(self, config: ServeConfig, models: Models) -> None:
        """Asks the interpreter for its version. Raises ConfigError when it has none, or an unknown one."""
        self._config, self._models = config, models
        self._python = config.python or sys.executable
        self.version = installed_version(self._python, self.environment())
        self._release = release_of(self.version, config.version)

    def environment(self, speculation: Speculation | None = None) -> dict[str, str]:
        pretence = {}
        if speculation and speculation.simulated:
            pretence = {
                "SGLANG_SIMULATE_ACC_LEN": str(speculation.simulated),
                "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
                # of trees only one fixed token can be accepted
                "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token" if speculation.topk == 1 else "fixed",
            }
        return child_environment(self._config) | pretence

    def command(self, port: int, speculation: Speculation | None, drafter: Path) -> list[str]:
        """Radix cache off: a hit would shorten the prefill and change acceptance. Every step is streamed, as a delta.

        Beside a random drafter no text is made: nobody reads it, and a text of random tokens keeps SGLang's detokenizer
        busier than its GPU once a small target answers 16 requests at once.
        """
        config = self._config
        words: dict[str, object | None] = {
            "--model-path": self._models.target,
            "--host": "127.0.0.1",
            "--port": port,
            "--tp-size": tensor_parallel(config),
            "--dtype": config.dtype,
            "--random-seed": self._models.seed,
            "--max-running-requests": config.max_running,
            self._release.graph_batch: config.max_running,
            "--stream-interval": 1,
            "--decode-log-interval": 1,
            "--context-length": config.context_length,
            "--mem-fraction-static": config.memory_share,
        }
        flags = [text for name, value in words.items() if value is not None for text in (name, str(value))]
        flags += ["--disable-radix-cache", "--incremental-streaming-output", "--enable-metrics"]
        flags += ["--trust-remote-code"] if self._models.trust_remote_code else []
        flags += [] if self._models.drafter else ["--skip-tokenizer-init"]
        return [
            *(self._python, "-m", "sglang.launch_server"),
            *flags,
            *self.flags(speculation, str(drafter)),
            *config.args,
        ]

    def flags(self, speculation: Speculation | None, drafter: str) -> list[str]:
        if speculation is None:
            return []
        words = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter]
        words += ["--speculative-num-steps", str(speculation.steps), "--speculative-eagle-topk", str(speculation.topk)]
        words += ["--speculative-num-draft-tokens", str(speculation.draft_tokens)]
        backend = self._config.draft_attention
        return words + (["--speculative-draft-attention-backend", backend] if backend else [])

    def reads(self) -> Engine:
        release = re.match(r"\d+\.\d+\.\d+", self._config.version or self.version)
        assert release  # by release_of
        return Engine("sglang", release.group())

    def body(self, work: Work) -> dict[str, Any]:
        """Every sampling parameter is named: the server would take others from the target's generation config."""
        sampling = {
            "temperature": work.temperature,
            "max_new_tokens": work.max_new_tokens,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "ignore_eos": work.past_end,
        }
        body: dict[str, Any] = {"input_ids": list(work.input_ids), "sampling_params": sampling, "stream": not work.gaps}
        if work.gaps:
            body |= {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
        return body

    def answer(self, reply: Reply) -> Answer:
        if not reply.events:
            raise ServingError(f"sglang: expected an answer, found nothing (status {reply.status}).")
        if reply.status != 200:
            text = reply.events[-1][1].decode(errors="replace")[:300]
            raise (InputError if reply.status == 400 else ServingError)(f"sglang: {reply.status}: {text}")
        tokens: list[int] = []
        counts: list[int] = []
        meta: dict[str, Any] = {}
        for _, payload in reply.events:
            event = read_event("sglang", payload)
            try:
                ids, meta = event["output_ids"], event["meta_info"]
                made = int(meta["completion_tokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ServingError(
                    f"sglang {self.version}: expected output_ids and meta_info.completion_tokens, found {payload[:200]!r} "
                    f"({error!r})."
                ) from None
            counts.append(made - len(tokens))
            # a delta, or from a server that does not send deltas everything so far
            tokens = tokens + ids if len(ids) < made else ids[:made]
            if len(tokens) != made:
                raise ServingError(f"sglang: expected {made} tokens so far, found {len(tokens)}. Events were lost.")
        reason = meta.get("finish_reason") or {}
        if not tokens or reason.get("type") not in ("stop", "length"):
            raise ServingError(f"sglang: the answer broke off: {reason.get('message', reason)}.")
        return Answer(
            tokens=tokens,
            counts=counts,
            times=[at for at, _ in reply.events],
            started=reply.started,
            stopped=reason["type"] == "stop",
            accepted=self._accepted(meta),
            gaps=_gaps(meta),
        )

    def counters(self, get: Get) -> Any:
        return None

    def counted(
        self, answers: list[Answer], before: Any, after: Any, *, speculating: bool, undisturbed: bool
    ) -> list[Answer]:
        return answers

    def facts(self, get: Get) -> EngineFacts:
        text = get("/server_info")
        try:
            info = json.loads(text)
            state = (info.get("internal_states") or [{}])[0]
            running = state.get(self._release.running) or info.get("max_running_requests") or self._config.max_running
            running = int(running) * int(info.get("dp_size") or 1)
        except (ValueError, AttributeError, TypeError, IndexError) as error:
            raise ServingError(f"sglang: /server_info is not understood ({error!r}): {text[:200]!r}") from None
        return EngineFacts(
            name=self.name,
            version=str(info.get("version", self.version)),
            server=f", up since {json.dumps(info.get('startup_time'), sort_keys=True)}",
            max_concurrency=running,
            simulated=[f"{key}={value}" for key, value in state.items() if "simulate_acc_len" in key and value],
            dtype=str(info.get("dtype", self._config.dtype)),
            device=str(info.get("device") or "cuda"),
        )

    def _accepted(self, meta: dict[str, Any]) -> list[int] | None:
        """Accepted drafts of each pass, sorted; None when there was no pass. Raises ServingError for foreign names."""
        passes = meta.get("spec_verify_ct")
        if not passes:
            return None
        key = next((name for name in self._release.histogram if name in meta), None)
        total = next((name for name in self._release.correct if name in meta), None)
        if key is None or total is None:
            raise ServingError(
                explain(
                    "acceptance figures",
                    where=f"meta_info of sglang {self.version}",
                    expected=f"{' or '.join(self._release.histogram)} and {' or '.join(self._release.correct)}",
                    found=sorted(name for name in meta if name.startswith("spec_")),
                    fix="This server names them otherwise: use a version from the table, or set serve.version.",
                )
            )
        accepted = [j for j, count in enumerate(meta[key]) for _ in range(count)]
        if len(accepted) != passes or sum(accepted) != meta[total]:
            raise ServingError(
                f"sglang: its figures contradict each other: {passes} passes and {meta[total]} accepted drafts, but the "
                f"histogram {meta[key]}."
            )
        return accepted


def installed_version(python: str, environment: dict[str, str]) -> str:
    """Version of sglang as that interpreter sees it. Raises ConfigError when there is none."""
    try:
        done = subprocess.run(
            [python, "-c", ASK_VERSION], env=environment, capture_output=True, text=True, timeout=VERSION_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"serve.python {python}: cannot be run ({error}). Name an interpreter.") from None
    if done.returncode or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no version"])[-1]
        raise ConfigError(
            explain(
                "no sglang",
                where=python,
                expected="an installed sglang",
                found=last,
                fix="Name the interpreter that has it (serve.python), or its folder: serve.env {PYTHONPATH: ...}.",
            )
        )
    return done.stdout.strip()


def _gaps(meta: dict[str, Any]) -> list[float] | None:
    """Best less second-best log-probability of each token, where asked for."""
    top = meta.get("output_top_logprobs")
    if not top:
        return None
    return [float(two[0][0]) - float(two[1][0]) if two and len(two) > 1 else float("inf") for two in top]
