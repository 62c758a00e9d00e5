"""The `ray-eagle` command: parses, calls a stage, prints. No logic.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 130 stopped by Ctrl-C or SIGTERM. Results go to stdout, everything
else to stderr; with --address, stdout is the job's log.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ray_eagle.cli_drafter import drafter_app
from ray_eagle.cli_options import ANY_SETTING, Address, ConfigFile, Debug, InJob, Json, Preset, settings_help
from ray_eagle.cli_options import explained as _explained
from ray_eagle.cli_preflight import FreeGpus, Gpus, Pids, Yes, gpu_flags, gpus_command
from ray_eagle.cli_serve import HELP as SERVE_HELP
from ray_eagle.cli_serve import serve_command
from ray_eagle.config import Config
from ray_eagle.errors import ConfigError
from ray_eagle.output import quiet, stdout_for_results
from ray_eagle.settings import LoadedConfig, as_yaml, load_config

HELP = {
    "preflight": "Is everything there, compatible and free? What will it cost?",
    "breakeven": "What must a drafter reach to be worth serving? Measured with a random one, or computed from two rates.",
    "generate": "Let the target write the conversations that the drafter learns from.",
    "extract": "Capture the target's hidden states over the conversations.",
    "vocab": "Choose the tokens that the drafter may say.",
    "train": "Train the drafter (or fine-tune a given one) and export it for SGLang.",
    "probe": "Serve the trained drafter (before training: the given one), measure acceptance and speed, and judge. "
    "With --from-shards: predict from captured states, without a server.",
    "report": "Gather what the run found: report.json and a table.",
    "run": "All stages in order: skips what is done, and stops when a drafter pays already or none can.",
}
SECTIONS = {name: (name,) for name in HELP if name in Config.model_fields} | {
    "breakeven": ("breakeven", "serve", "drafter", "vocab"),
    "generate": ("generate", "states"),
    "extract": ("extract", "states"),
    "probe": ("probe", "serve", "drafter"),
    "train": ("train", "drafter"),
    "run": (),
    "report": (),
}
WHOLE_RUN = {"extract": ("allow_quarantine",), "run": ("train_anyway", "allow_quarantine")}
"""Settings of no section, by the stage whose help shows them."""

app = typer.Typer(
    name="ray-eagle",
    help="Tell whether an EAGLE-3 drafter makes a language model faster, and train one that does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Look at the settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")
conversations_app = typer.Typer(help="Look at the conversations of a run.", no_args_is_help=True)
app.add_typer(conversations_app, name="conversations")
app.add_typer(drafter_app, name="drafter")


def _stage_command(name: str) -> None:
    epilog = settings_help(SECTIONS.get(name, ()), WHOLE_RUN.get(name, ()))

    @app.command(name, help=HELP[name], epilog=epilog, context_settings=ANY_SETTING)
    def command(
        context: typer.Context,
        config: ConfigFile = None,
        preset: Preset = None,
        redo: Annotated[bool, typer.Option("--redo", help="Discard what this stage made, and make it again.")] = False,
        address: Address = None,
        json_output: Json = False,
        debug: Debug = False,
        in_job: InJob = False,
        from_shards: Annotated[
            bool,
            typer.Option(
                "--from-shards", help="Predict from captured states, without a server.", hidden=name != "probe"
            ),
        ] = False,
    ) -> None:
        words = list(context.args)
        if from_shards and name != "probe":  # one command serves all stages: to the others it is as unknown as any word
            words.append("--from-shards")
        with _explained(debug):
            loaded = load_config(config, preset, words)
            if address:
                extra = ["--redo"] * redo + ["--from-shards"] * from_shards + ["--json"] * json_output
                _submit(name, loaded, address, extra)
            with stdout_for_results() as out:
                _run_stage(name, loaded.config, redo, from_shards, json_output, in_job, out)


for _name in HELP:
    if _name not in ("run", "preflight"):
        _stage_command(_name)


@app.command("preflight", help=HELP["preflight"], epilog=settings_help(("preflight",)), context_settings=ANY_SETTING)
def preflight_command(
    context: typer.Context,
    config: ConfigFile = None,
    preset: Preset = None,
    redo: Annotated[bool, typer.Option("--redo", help="Check again (it always does).")] = False,
    gpus: Gpus = False,
    free_gpus: FreeGpus = False,
    pid: Pids = None,
    yes: Yes = False,
    address: Address = None,
    json_output: Json = False,
    debug: Debug = False,
    in_job: InJob = False,
) -> None:
    with _explained(debug):
        loaded = load_config(config, preset, list(context.args))
        flags = gpu_flags(gpus, free_gpus, pid, yes)
        if address:
            _submit("preflight", loaded, address, flags + ["--json"] * json_output)
        with stdout_for_results() as out:
            if flags:
                quiet(loaded.config)
                gpus_command(loaded.config, free_gpus, pid or [], yes, json_output, out)
            else:
                _run_stage("preflight", loaded.config, redo, False, json_output, in_job, out)


@app.command("run", help=HELP["run"], epilog=settings_help((), WHOLE_RUN["run"]), context_settings=ANY_SETTING)
def run_all(
    context: typer.Context,
    config: ConfigFile = None,
    preset: Preset = None,
    redo: Annotated[
        str | None, typer.Option(help="Discard this stage and all later ones, and make them again.")
    ] = None,
    address: Address = None,
    json_output: Json = False,
    debug: Debug = False,
    in_job: InJob = False,
) -> None:
    with _explained(debug):
        loaded = load_config(config, preset, list(context.args))
        if address:
            _submit("run", loaded, address, (["--redo", redo] if redo else []) + ["--json"] * json_output)
        with stdout_for_results() as out, _pipeline(loaded.config, in_job) as pipeline:
            from ray_eagle.stages import ORDER, copy_config

            if redo and redo not in ORDER:
                raise ConfigError(f"--redo: expected a stage ({', '.join(ORDER)}), found {redo!r}.")
            copy_config(loaded.config, pipeline.run)
            report = pipeline.all(redo=redo)
            _print_report(report, json_output, out)


@app.command(
    "serve", help=SERVE_HELP, epilog=settings_help(("serve", "target", "drafter")), context_settings=ANY_SETTING
)
def serve_until_stopped(
    context: typer.Context,
    config: ConfigFile = None,
    preset: Preset = None,
    random: Annotated[bool, typer.Option("--random", help="Draft with random weights, whatever there is.")] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    with _explained(debug, "stopped: the server is gone"):
        loaded = load_config(config, preset, list(context.args)).config
        with stdout_for_results() as out, _pipeline(loaded, False) as pipeline:
            serve_command(pipeline.config, pipeline.run, random, json_output, out)


@app.command("verify", help="Re-read a whole hidden-state dataset and name each fault.")
def verify_command(
    folder: Annotated[str, typer.Argument(help="Folder or URI of the dataset (RUN/hidden_states).")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Discard the damaged units; the next `ray-eagle extract` makes them again.")
    ] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    with _explained(debug):
        from ray_eagle.hidden_states.verify import discard, verify
        from ray_eagle.run import Folder

        progress = _progress()

        def seen(done: int, total: int) -> None:
            if done == 1:
                progress.start("verify", total, "units")
            progress.advance(1)

        try:
            faults = verify(Folder.at(folder), seen)
        finally:
            progress.close()
        messages = [fault.message for fault in faults]
        if json_output:
            print(json.dumps({"folder": folder, "faults": messages}))
        else:
            print("\n".join(messages) or f"{folder}: everything is as it was written")
        lent = {fault.unit for fault in faults if fault.lent}
        own = {fault.unit for fault in faults} - lent
        if own and repair:
            discard(Folder.at(folder), own)
            progress.say("verify: the damaged units are discarded; run `ray-eagle extract` to make them again")
        elif own:
            progress.say("verify: --repair discards the damaged units, then `ray-eagle extract` makes them again")
        if lent:
            progress.say(
                f"verify: borrowed units that stay as they are: {len(lent)}. Repair the dataset that lends them first, as said"
            )
        if lent or (own and not repair):
            raise typer.Exit(1)


@app.command(
    "plan",
    help="What will extraction cost in bytes, seconds and memory? Counts, and calibrates with the real actors for a minute.",
    context_settings=ANY_SETTING,
)
def plan_command(
    context: typer.Context,
    config: ConfigFile = None,
    preset: Preset = None,
    seconds: Annotated[float, typer.Option(min=0, help="Length of the calibration; 0 only counts.")] = 60,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    with _explained(debug):
        loaded = load_config(config, preset, list(context.args)).config
        with stdout_for_results() as out, _pipeline(loaded, False) as pipeline:
            from ray_eagle.hidden_states.forecast import forecast
            from ray_eagle.report.table import render_forecast

            if seconds:
                pipeline.connect()
            found = forecast(pipeline.config, pipeline.run, pipeline.facts, pipeline.progress, seconds)
            if json_output:
                print(json.dumps(found.model_dump(mode="json")), file=out)
            else:
                Console(file=out, width=None if out.isatty() else 100).print(render_forecast(found))


@config_app.command("show", help="Print every effective setting and where it came from.", context_settings=ANY_SETTING)
def config_show(
    context: typer.Context,
    config: ConfigFile = None,
    preset: Preset = None,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    with _explained(debug):
        loaded = load_config(config, preset, list(context.args))
        if json_output:
            print(json.dumps({key: {"value": value, "from": origin} for key, value, origin in loaded.rows()}))
            return
        table = Table("setting", "value", "from")
        for key, value, origin in loaded.rows():
            table.add_row(key, escape(as_yaml(value)), escape(origin), style=None if origin == "default" else "bold")
        console = Console()
        console.print(table) if console.is_terminal else Console(width=200).print(table)


@conversations_app.command(
    "show",
    help="Print conversations, supervised tokens coloured, special tokens visible.",
    context_settings=ANY_SETTING,
)
def conversations_show(
    context: typer.Context,
    config: ConfigFile = None,
    preset: Preset = None,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many.")] = 3,
    only: Annotated[str | None, typer.Option("--id", help="Only the one with this id.")] = None,
    split: Annotated[str | None, typer.Option(help="Only of train, validation or held_out.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Token by token, each with its id.")] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    with _explained(debug):
        loaded = load_config(config, preset, list(context.args)).config
        folder = _run_folder(loaded).of("generate")
        from ray_eagle.cli_conversations import print_conversations

        print_conversations(
            loaded, folder, Console(), number=number, only=only, split=split, ids=ids, json_output=json_output
        )


@conversations_app.command(
    "stats",
    help="Lengths, supervised share, categories, finish reasons, reasoning, duplicates.",
    context_settings=ANY_SETTING,
)
def conversations_stats(
    context: typer.Context,
    config: ConfigFile = None,
    preset: Preset = None,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    with _explained(debug):
        loaded = load_config(config, preset, list(context.args)).config
        folder = _run_folder(loaded).of("generate")
        from ray_eagle.cli_conversations import print_stats

        print_stats(loaded, folder, Console(), json_output=json_output)


def _run_stage(
    name: str, config: Config, redo: bool, from_shards: bool, json_output: bool, in_job: bool, out: TextIO
) -> None:
    with _pipeline(config, in_job) as pipeline:
        if from_shards:
            from ray_eagle.probing.stage import predict_from_shards
            from ray_eagle.report.table import prediction_line

            pipeline.check_current("extract", reader="probe")
            found = predict_from_shards(config, pipeline.run, pipeline.facts, pipeline.progress)
            text = json.dumps(found.model_dump(mode="json")) if json_output else prediction_line(found)
            print(text, file=out)
            return
        from ray_eagle.stages import copy_config

        copy_config(config, pipeline.run)
        if name == "probe" and config.drafter.path and not pipeline.run.finished("train"):
            name = "probe-given"
        outcome = pipeline.stage(name, redo=redo)
        if name == "report":
            from ray_eagle.report.model import build_report

            _print_report(build_report(config, pipeline.run), json_output, out)
        elif json_output:
            origin = pipeline.run.origin(name)
            facts = outcome.facts if outcome else pipeline.facts_of(name)
            result = {"stage": name, "skipped": outcome is None, "facts": facts}
            print(json.dumps({**result, "origin": origin.model_dump(mode="json") if origin else None}), file=out)


def _run_folder(config: Config, in_job: bool = False) -> Any:
    """The run folder, before anything that takes seconds to import: wrong usage is told at once."""
    from ray_eagle.run import RunFolder

    folder = RunFolder.open(config.run, in_job=in_job)
    quiet(config)
    return folder


@contextmanager
def _pipeline(config: Config, in_job: bool) -> Iterator[Any]:
    run = _run_folder(config, in_job)
    from ray_eagle.stages import Pipeline

    progress = _progress(in_job)
    try:
        yield Pipeline(config, run, progress)
    finally:
        progress.close()


def _print_report(report: Any, json_output: bool, out: TextIO) -> None:
    from ray_eagle.report.model import to_json
    from ray_eagle.report.table import render

    if json_output:
        print(json.dumps(to_json(report)), file=out)
    else:
        Console(file=out, width=None if out.isatty() else 100).print(render(report))


def _submit(stage: str, loaded: LoadedConfig, address: str, extra: list[str]) -> NoReturn:
    from ray_eagle.submission import submit

    raise typer.Exit(submit(stage, loaded.config, address, extra=extra, emit=lambda line: print(line, flush=True)))


def _progress(in_job: bool = False) -> Any:
    from ray_eagle.terminal import LogProgress, TerminalProgress

    console = Console(stderr=True)
    return TerminalProgress(console) if console.is_terminal and not in_job else LogProgress()


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `ray-eagle` and of the job scripts."""
    app(args=arguments)
