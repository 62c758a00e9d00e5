"""The command line as a user meets it: what it says when something is in the way, and what it prints."""

import errno
import json
import logging
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from ray.exceptions import GetTimeoutError, RayTaskError
from typer.testing import CliRunner

from ray_eagle.cli import app
from ray_eagle.cli_options import explained
from ray_eagle.conversations.conversation import Conversation, part_name
from ray_eagle.hidden_states.dataset import read_plan, record_name
from ray_eagle.run import Folder, RunFolder
from tests.drafters import tiny_folder
from tests.random_data import random_dataset
from tests.unit.test_reader import borrower
from tests.unit.test_vocab import random_rows, write_dataset

READ_ONLY = Path("/proc/ray_eagle")  # where not even root can make anything


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def python(program: str, *words: str) -> str:
    """What a fresh interpreter prints at its end: nothing is imported there yet."""
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    return ended.stdout.strip()


# --- what is imported -----------------------------------------------------------------------------------------------


def test_wrong_usage_is_told_before_anything_slow_is_imported(tmp_path: Path) -> None:
    program = (
        "import json, sys\nfrom typer.testing import CliRunner\nfrom ray_eagle.cli import app\n"
        "codes = [CliRunner().invoke(app, words).exit_code for words in json.loads(sys.argv[1])]\n"
        "print(codes, sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()))"
    )
    (tmp_path / "afile").touch()
    commands = [["report"], ["extract"], ["run", "--redo", "train"], ["plan"], ["serve"], ["conversations", "stats"],
                ["conversations", "show"], ["train", "--run", str(tmp_path / "afile")], ["probe", "--in-job", "--run", "x"]]  # fmt: skip
    assert python(program, json.dumps(commands)) == f"{[2] * len(commands)} []"


@pytest.mark.parametrize(("prompts", "offline"), [("builtin", "1"), ("hub:people/chats", None)])
def test_libraries_are_quiet_and_ask_the_hub_only_for_its_own_prompts(prompts: str, offline: str | None) -> None:
    program = (
        "import os, sys\nfrom ray_eagle.output import quiet\nfrom ray_eagle.settings import load_config\n"
        "os.environ.pop('HF_HUB_OFFLINE', None)\n"
        "quiet(load_config(flags=['--generate.prompts', sys.argv[1]]).config)\n"
        "from transformers.utils.logging import get_verbosity, is_progress_bar_enabled\n"
        "print(is_progress_bar_enabled(), get_verbosity(), os.environ.get('HF_HUB_OFFLINE'))"
    )
    assert python(program, prompts) == f"False {logging.ERROR} {offline}"


def test_a_damaged_prompts_file_is_told_before_a_cluster_starts(tmp_path: Path, target_folder: Path) -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom ray_eagle.cli import app\n"
        "for answers in ('regenerate', 'keep'):\n"
        "    words = ['generate', '--generate.answers', answers, *sys.argv[1:]]\n"
        "    print(CliRunner().invoke(app, words).stderr.partition('error: ')[2])\n"
        "import ray\nprint(ray.is_initialized())"
    )
    file = tmp_path / "prompts.json"
    file.write_text('[{"turns": ["cut sh')
    words = ["--run", tmp_path / "run", "--target.path", target_folder, "--generate.prompts", file]
    *errors, started = python(program, *map(str, words)).split("\n\n")
    assert [error.partition(", found ")[0] for error in errors] == [f"prompts file {file}: expected JSON"] * 2
    assert started == "False"


# --- help -----------------------------------------------------------------------------------------------------------


def test_help_shows_what_may_be_typed() -> None:
    out = "".join(run(stage, "--help")[1] for stage in ("breakeven", "generate", "train"))
    for line in (
        "--breakeven.steps [1, 2, 3, 4]",
        "--drafter.path null",
        "--generate.urls []",
        '--generate.reasoning_marks ["<think>\\n", "\\n</think>\\n\\n"]',
        "--generate.answers regenerate  (regenerate | keep)",
        "--train.use_gpu false",
    ):
        assert f"  {line}\n      " in out
    for words in ("(1, 2", "None", "()", "False", "'<think>"):
        assert words not in out
    _, _, settings = run("serve", "--help")[1].partition("lists all):")
    lines = [line for line in settings.splitlines() if line]
    assert len(lines) > 60
    names = [i for i, line in enumerate(lines) if line.startswith("  --")]
    assert len(names) > 30 and names[0] == 0
    for start, end in pairwise([*names, len(lines)]):  # filled, whatever its docstring's breaks
        described = lines[start + 1 : end]
        assert described and all(line.startswith("      ") and line[6] != " " for line in described)
        assert all(len(line) + len(after.split()[0]) > 78 - 2 for line, after in pairwise(described))


def test_help_fits_80_columns_and_shows_flags_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for stage in ("breakeven", "generate", "extract", "train", "probe", "run"):
        assert max(map(len, run(stage, "--help")[1].splitlines())) <= 80, stage
    for stage, flag in (("extract", "--allow-quarantine"), ("run", "--train-anyway"), ("probe", "--from-shards")):
        assert f"  {flag} " in run(stage, "--help")[1]
    assert "--from-shards" not in run("train", "--help")[1]
    code, _, err = run("train", "--from-shards", "--run", "x")
    assert code == 2 and "unknown setting 'from_shards'" in err


@pytest.mark.parametrize("stage", ["generate", "extract"])
def test_help_of_a_stage_shows_what_it_takes_from_captured_states(stage: str) -> None:
    out = run(stage, "--help")[1]
    for name in (f"{stage}.actors", "states.path", "states.layers"):
        assert f"\n  --{name} " in out


# --- verify ---------------------------------------------------------------------------------------------------------


def test_verify_says_a_line_in_a_while_not_one_a_unit(tmp_path: Path) -> None:
    write_dataset(Folder.at(tmp_path), random_rows(1, list(range(60, 90))))
    units = len(read_plan(Folder.at(tmp_path)).units)
    assert units > 3
    code, out, err = run("verify", tmp_path)
    assert (code, out) == (0, f"{tmp_path}: everything is as it was written\n")
    assert err.startswith(f"verify: {units} of {units} units, ")
    assert len(err.splitlines()) == 1


def test_verify_repairs_no_borrowed_unit_whose_lender_is_damaged(tmp_path: Path) -> None:
    lender, units, _ = random_dataset(tmp_path / "lender")
    folder = borrower(tmp_path / "mine", units, lender)
    folder.write_json("origin.json", {"finished": "now"})
    shard = Path(lender.file(lender.read_json(record_name(1))["file"]))
    shard.write_bytes(shard.read_bytes()[:-2000])
    for words in ((), ("--repair",)):
        code, out, err = run("verify", folder.path, *words)
        assert code == 1 and f"ray-eagle verify {lender.path} --repair" in out
        assert "borrowed units that stay as they are: 1." in err and "discard" not in err
    assert folder.exists(record_name(1)) and folder.read_json("origin.json") == {"finished": "now"}
    folder.write_bytes(record_name(2), b"damage of its own")
    code, out, err = run("verify", folder.path, "--repair")
    assert code == 1 and "the damaged units are discarded" in err and "stay as they are" in err
    assert folder.exists(record_name(1)) and not folder.exists(record_name(2))


# --- conversations --------------------------------------------------------------------------------------------------


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """A run folder with five conversations, two of them for validation."""
    rows = [Conversation(f"c{i}", "chat", "validation" if i > 2 else "train", [], [1, 2], [[1, 2]], ["stop"]).to_row()
            for i in range(5)]  # fmt: skip
    folder = RunFolder.open(str(tmp_path)).of("generate")
    folder.write_jsonl(part_name(0), rows[:2])
    folder.write_jsonl(part_name(1), rows[2:])
    return tmp_path


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ([], ["c0", "c1", "c2"]),
        (["-n", 1], ["c0"]),
        (["-n", 9], ["c0", "c1", "c2", "c3", "c4"]),
        (["--split", "validation"], ["c3", "c4"]),
        (["--id", "c4"], ["c4"]),
    ],
)
def test_conversations_as_json_are_one_object(talks: Path, words: list[object], ids: list[str]) -> None:
    code, out, _ = run("conversations", "show", "--run", talks, "--json", *words)
    assert code == 0
    assert [row["source_id"] for row in json.loads(out)["conversations"]] == ids


@pytest.mark.parametrize(
    ("words", "asked", "way_out"),
    [
        (["--id", "nope"], " with id 'nope', found others alone (splits: train 3, validation 2). ", "Without --id"),
        (["--split", "foo"], " in split 'foo', found others alone (splits: train 3, validation 2). ", "Without --id"),
        (["--id", "c0", "--split", "validation"], " with id 'c0' in split 'validation', found others ", "Without --id"),
        (["--run", "new"], ", found none. ", "Run `ray-eagle generate` first."),
    ],
)
def test_what_no_conversation_is_says_which_there_are(
    talks: Path, words: list[object], asked: str, way_out: str
) -> None:
    code, out, err = run("conversations", "show", "--run", talks, *words)
    assert (code, out) == (1, "")
    assert f"/conversations: expected conversations{asked}" in err and way_out in err


# --- the filesystem -------------------------------------------------------------------------------------------------


def test_a_file_where_the_run_folder_should_be_is_named(tmp_path: Path) -> None:
    file = tmp_path / "afile"
    file.touch()
    for place in (file, file / "run"):
        code, out, err = run("extract", "--run", place)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: run folder: {place}: expected a folder, found a file at {file}. Name another")
        assert len(err.splitlines()) == 1
    code, _, err = run("extract", "--run", "nfs://host/run")
    assert code == 2
    assert err.startswith("error: no folder: nfs://host/run: expected the URI of a folder, found Unrecognized")


def test_a_drafter_goes_nowhere_and_the_place_is_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "drafter")
    (tmp_path / "afile").touch()
    for place, why in ((tmp_path / "afile" / "x", "Not a directory"), (READ_ONLY, "No such file or directory")):
        code, out, err = run("drafter", "convert", folder, place)
        assert (code, out) == (1, "")
        assert err.startswith(f"error: reading or writing failed: {place}: expected a place that can be ")
        assert f", found {why}. " in err and len(err.splitlines()) == 1


def in_a_task(error: OSError) -> OSError:
    """As `ray.get` raises it."""
    raised: OSError = RayTaskError("read", f"Traceback (most recent call last)\n{error!r}", error).as_instanceof_cause()
    return raised


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/run/a"), "failed: /run/a: expected .* found Permission denied. "),
        (in_a_task(PermissionError(errno.EACCES, "Denied", "/run/b")), "failed: /run/b: expected .* found Denied. "),
        (OSError("GetObject:\n  AccessDenied"), "failed: OSError: expected .* found GetObject: AccessDenied. "),
        (TimeoutError(errno.ETIMEDOUT, "Timed out", "/nfs/c"), "failed: /nfs/c: expected .* found Timed out. "),
    ],
)  # fmt: skip
def test_what_the_system_refuses_is_one_line_and_a_traceback_only_when_asked(
    error: OSError, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, explained(debug=False):
        raise error
    assert caught.value.exit_code == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert re.match(f"error: reading or writing {words}", err)
    with pytest.raises(OSError) as raised, explained(debug=True):
        raise error
    assert raised.value is error
    with pytest.raises(BrokenPipeError), explained(debug=False):  # `ray-eagle report | head`
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "TimeoutError: expected .* found silence. "),
        (
            GetTimeoutError("Get timed out:\n  not ready"),
            "GetTimeoutError: expected .* found Get timed out: not ready. ",
        ),
        (in_a_task(TimeoutError("30 s")), "TimeoutError: expected .* found 30 s. "),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "ConnectionResetError: expected .* reset by peer. "),
    ],
)
def test_another_process_that_does_not_answer_is_no_file_that_cannot_be_read(
    error: OSError, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, explained(debug=False):
        raise error
    assert caught.value.exit_code == 1
    assert re.fullmatch(f"error: no answer: {words}Run the same command again; .*\n", capsys.readouterr().err)
