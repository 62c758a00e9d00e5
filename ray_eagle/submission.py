"""Run a stage on a cluster: submit it as a Ray job, follow its log, and report how it ended.

The job gets this process's own copy of the package and the effective settings with absolute paths, so the cluster runs
exactly what the submitter would have run here.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import requests
import yaml
from ray.job_submission import JobStatus, JobSubmissionClient

from ray_eagle.config import Config
from ray_eagle.errors import ConfigError, WorkerError, explain
from ray_eagle.settings import absolute_paths

PACKAGE = Path(__file__).parent
STAGES = ("preflight", "breakeven", "generate", "extract", "vocab", "train", "probe", "report", "run")
EXCLUDES = ["__pycache__", "*.pyc"]  # they would change the package's hash from call to call
ENDING_S = 30.0

SCRIPT = '''"""{title} as a Ray job.

ray job submit --address http://127.0.0.1:8265 --working-dir . -- python jobs/{stage}.py -c run.yaml
"""

import sys

from ray_eagle.cli import main

main(["{stage}", *sys.argv[1:], "--in-job"])
'''


def job_script(stage: str) -> str:
    """The content of jobs/STAGE.py: the same in a checkout, and where the package is installed without one."""
    return SCRIPT.format(stage=stage, title="Every stage in turn" if stage == "run" else f"The {stage} stage")


def submit(stage: str, config: Config, address: str, *, extra: list[str], emit: Callable[[str], None]) -> int:
    """Run `stage` as a job of the cluster whose dashboard is at `address` (`http://127.0.0.1:8265`).

    `extra` are further words of the stage's command line; `emit` gets each line of the job's log, and what becomes of
    the job. Returns 0 when it succeeded, else 1. Ctrl-C stops the job. Raises ConfigError when nothing answers there.
    """
    client = _client(address)
    with tempfile.TemporaryDirectory(prefix="ray-eagle-job-") as text:
        folder = Path(text)
        write_job(folder, stage, config)
        words = ["python", f"jobs/{stage}.py", "-c", "run.yaml", *extra]
        return run_job(client, stage, words, folder, emit)


def write_job(folder: Path, stage: str, config: Config) -> None:
    """The job's working directory: `jobs/STAGE.py`, and `run.yaml` with the effective settings."""
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs" / f"{stage}.py").write_text(job_script(stage))
    settings = absolute_paths(config).model_dump(mode="json")
    settings["ray"]["address"] = None  # a job joins the cluster that runs it
    (folder / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))


def run_job(
    client: JobSubmissionClient, stage: str, words: list[str], folder: Path, emit: Callable[[str], None]
) -> int:
    """Submit the command in `folder` with this package, follow it to its end, and return 0 if it succeeded, else 1, or 130 after Ctrl-C."""
    job_id = f"eagle-{stage}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    environment = {
        "working_dir": str(folder),
        "py_modules": [str(PACKAGE)],
        "excludes": EXCLUDES,
        "env_vars": {"RAY_AUTH_MODE": os.environ["RAY_AUTH_MODE"]},
    }
    try:
        client.submit_job(entrypoint=shlex.join(words), submission_id=job_id, runtime_env=environment)
    except (RuntimeError, requests.RequestException) as error:
        raise WorkerError(f"job {job_id} was not accepted by {client.get_address()}: {error}") from error
    emit(f"job {job_id} submitted to {client.get_address()}")
    try:
        info = _follow(client, job_id, emit)
    except KeyboardInterrupt:
        emit(f"stopping job {job_id} ...")
        info = _stop(client, job_id)
        emit(f"job {job_id} is {info.status.value}; what it had committed stays in the run folder.")
        return 0 if info.status == JobStatus.SUCCEEDED else 130
    except (RuntimeError, requests.RequestException) as error:
        raise WorkerError(
            f"job {job_id}: the cluster at {client.get_address()} no longer answers ({error}). The job may go on: "
            f"`ray job status --address {client.get_address()} {job_id}`."
        ) from error
    if info.status == JobStatus.SUCCEEDED:
        emit(f"job {job_id} succeeded")
        return 0
    reason = (info.message or "no reason given").partition(", last available logs")[0]  # its log was just emitted
    log = f"ray job logs --address {client.get_address()} {job_id}"
    emit(f"job {job_id} {info.status.value}: {reason}. Its log: `{log}`.")
    return 1


def _follow(client: JobSubmissionClient, job_id: str, emit: Callable[[str], None]) -> Any:
    """Emit the log line by line until the job has ended, and return its info; a broken connection is joined again."""
    shown = 0

    async def tail() -> None:
        nonlocal shown
        number, rest = 0, ""
        async for chunk in client.tail_job_logs(job_id):  # from the first line, each time
            *lines, rest = (rest + chunk).split("\n")
            for line in lines:
                number += 1
                if number > shown:
                    emit(line)
                    shown = number
        if rest and number + 1 > shown:
            emit(rest)
            shown = number + 1

    while True:
        with contextlib.suppress(RuntimeError, aiohttp.ClientError):  # if the cluster is gone, the next line says so
            asyncio.run(tail())
        info = client.get_job_info(job_id)
        if info.status.is_terminal():
            return info
        time.sleep(0.5)


def _stop(client: JobSubmissionClient, job_id: str) -> Any:
    """Stop the job and return its info once it has ended."""
    client.stop_job(job_id)
    deadline = time.monotonic() + ENDING_S
    while not (info := client.get_job_info(job_id)).status.is_terminal() and time.monotonic() < deadline:
        time.sleep(0.2)
    return info


def _client(address: str) -> JobSubmissionClient:
    fix = "Start a cluster on this machine with `bash cluster/local.sh start`, or name the dashboard of a running one."
    expected = "the http URL of a Ray dashboard, such as http://127.0.0.1:8265"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(explain("cluster address", where="--address", expected=expected, found=address, fix=fix))
    logging.getLogger("ray").setLevel(logging.WARNING)  # uploads and closed connections are no news
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError, requests.RequestException) as error:
        found = "no answer" if isinstance(error, ConnectionError) else str(error)
        raise ConfigError(
            explain("no cluster", where=f"--address {address}", expected=expected, found=found, fix=fix)
        ) from error
