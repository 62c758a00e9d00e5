"""A stand-in for SGLang's server: a program that is started, asked and killed in its place, without a GPU.

`write_interpreter` makes the file that `serve.python` names. What it does is decided by environment variables
(`serve.env`), so the real command line reaches it:

STANDIN_VERSION  version that it claims (empty: sglang is not installed)
STANDIN_MODE     ok, slow, dies, hangs, never, broken, old-names, wrong-counts, merged, stalls, dies-in-answer, unequal
STANDIN_FILE     a file that a failure waits for or counts in, shared by restarts

Its target says token + 1 after each token (modulo 200), and the drafter is right `token % (steps + 1)` times in a row, or
as often as SGLANG_SIMULATE_ACC_LEN says.
"""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHILD = "trap '' TERM; exec -a sglang::scheduler sleep 1000"
"""A grandchild that does not leave by itself, as a scheduler that hangs in a kernel, under the title of one."""
VOCABULARY = 200
STEP_S = 0.002


def write_interpreter(folder: Path) -> Path:
    """An executable that stands for the interpreter with sglang in it."""
    path = folder / "python-with-sglang"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {Path(__file__).absolute()} "$@"\n')
    path.chmod(0o755)
    return path


def plain_answer(prompt: list[int], count: int) -> list[int]:
    return [(prompt[-1] + 1 + i) % VOCABULARY for i in range(count)]


def expected_passes(prompt: list[int], count: int, steps: int) -> list[tuple[int, int]]:
    """(start, accepted) of every pass of an answer of `count` tokens; the last may reach beyond it."""
    answer, passes, made = plain_answer(prompt, count), [], 1
    while made < count:
        accepted = answer[made - 1] % (steps + 1)
        passes.append((len(prompt) + made - 2, accepted))
        made += accepted + 1
    return passes


def simulated_passes(length: float, count: int) -> list[int]:
    """Accepted drafts of every pass of an answer of `count` tokens, where each yields `length` on average."""
    accepted: list[int] = []
    while 1 + sum(accepted) + len(accepted) < count:
        n = len(accepted)
        accepted.append(int((n + 1) * length) - int(n * length) - 1)
    return accepted


def option(words: list[str], name: str, default: str = "") -> str:
    return words[words.index(name) + 1] if name in words else default


class StandIn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mode, healthy_from = "ok", 0.0
    words: list[str] = []  # noqa: RUF012
    started = time.time()
    file = Path(os.environ.get("STANDIN_FILE", "/nonexistent"))

    def log_message(self, *arguments: Any) -> None:
        """Silent."""

    @property
    def steps(self) -> int:
        return int(option(self.words, "--speculative-num-steps", "0"))

    def do_GET(self) -> None:
        if self.path == "/health":
            if self.mode == "stalls" and self.file.exists():
                time.sleep(1000)
            ready = time.time() > self.healthy_from and self.mode != "never"
            self.reply({}, 200 if ready else 503)
        elif self.path == "/server_info":
            most = int(option(self.words, "--max-running-requests", "8"))
            if self.mode == "small":
                most = 2
            state = {"effective_max_running_requests_per_dp": most}
            info = {"internal_states": [state], "version": os.environ["STANDIN_VERSION"], "dtype": "bfloat16"}
            if self.mode == "restarts" and self.file.exists():
                info["startup_time"] = time.time()
            else:
                info["startup_time"] = self.started
            self.reply(info)
        else:
            self.reply({"error": {"message": "no such path"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if self.mode == "broken":
            self.stream([b"{not json"])
            return
        if self.mode == "hangs-in-answer":
            time.sleep(1000)
        if self.mode == "dies-in-answer" and self.file.exists():
            self.file.unlink()
            os._exit(3)
        answer = plain_answer(prompt, count)
        if self.mode in ("unequal", "unequal-far") and self.steps and prompt[0] == 2:
            answer[3] += 1
        gap = 1.5 if self.mode == "unequal-far" else 0.125
        if not body["stream"]:
            top = [[[-0.1, t, None], [-0.1 - gap, 0, None]] for t in answer]
            meta = {"completion_tokens": count, "finish_reason": {"type": "length"}, "output_top_logprobs": top}
            self.reply({"output_ids": answer, "meta_info": meta})
            return
        self.stream(self.events(prompt, answer))

    def events(self, prompt: list[int], answer: list[int]) -> Any:
        """One event a pass (or token), as deltas."""
        count = len(answer)
        passes = [accepted for _, accepted in expected_passes(prompt, count, self.steps)] if self.steps else []
        length = float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1"))
        if self.steps and length > 0:
            passes = simulated_passes(length, count)
        sizes = [1, *([accepted + 1 for accepted in passes] if self.steps else [1] * (count - 1))]
        if self.mode == "merged" and len(sizes) > 3:
            sizes[1:3] = [sizes[1] + sizes[2]]
        at = 0
        for size in sizes:
            new = answer[at : at + size]
            at += len(new)
            meta: dict[str, Any] = {"completion_tokens": at, "finish_reason": None}
            if at == count:
                meta["finish_reason"] = {"type": "length", "length": count}
                meta |= self.figures(passes)
            # a cycle drafts as well, so it is longer than a plain step
            time.sleep(STEP_S * (1 + 0.05 * self.steps))
            yield json.dumps({"text": "", "output_ids": new, "meta_info": meta}).encode()

    def figures(self, passes: list[int]) -> dict[str, Any]:
        if not passes:
            return {}
        histogram = [passes.count(j) for j in range(max(passes) + 1)]
        right = sum(passes)
        if self.mode == "wrong-counts":
            right += 1
        if self.mode == "old-names":
            return {"spec_verify_ct": len(passes), "spec_accepted_drafts": right, "spec_accept_histogram": histogram}
        if self.mode == "other-names":
            return {"spec_verify_ct": len(passes), "spec_hits": right}
        return {
            "spec_verify_ct": len(passes),
            "spec_num_correct_drafts": right,
            "spec_correct_drafts_histogram": histogram,
        }

    def reply(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, events: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + event + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def main(words: list[str]) -> None:
    mode = os.environ.get("STANDIN_MODE", "ok")
    if words[0] == "-c":
        version = os.environ.get("STANDIN_VERSION", "")
        if not version:
            sys.exit("importlib.metadata.PackageNotFoundError: No package metadata was found for sglang")
        sys.stdout.write(version)
        return
    subprocess.Popen(["bash", "-c", CHILD], start_new_session=True)
    print("the stand-in reads its weights", flush=True)
    if mode == "dies" or (mode == "dies-plain" and "--speculative-num-steps" not in words):
        sys.exit("CUDA out of memory")
    if mode == "silent":
        time.sleep(1000)
    StandIn.mode, StandIn.words = mode, words
    StandIn.healthy_from = time.time() + (1.0 if mode == "slow" else 0.0)
    server = ThreadingHTTPServer(("127.0.0.1", int(option(words, "--port"))), StandIn)
    threading.Thread(target=chatter, args=(mode,), daemon=True).start()
    server.serve_forever()


def chatter(mode: str) -> None:
    """A server that loads says so."""
    while mode == "never":
        print("still capturing graphs", flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1:])
