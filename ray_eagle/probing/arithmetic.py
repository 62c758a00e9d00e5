"""The stage `breakeven` where two rates are given: nothing is served, and no target is needed."""

from ray_eagle.config import Config
from ray_eagle.probing.breakeven import break_even_from_rates, can_pay
from ray_eagle.probing.reports import Breakeven
from ray_eagle.progress import Progress
from ray_eagle.run import RunFolder
from ray_eagle.stage import Outcome


def compute(config: Config, run: RunFolder, progress: Progress) -> Outcome:
    """R of `breakeven.baseline_tps` and `breakeven.cycle_ms`. Writes breakeven.json."""
    tps, ms, steps = config.breakeven.baseline_tps, config.breakeven.cycle_ms, config.probe.steps
    assert tps is not None and ms is not None  # the settings allow both or neither
    needed = break_even_from_rates(tps, ms)
    hope = "" if can_pay(needed, steps) else ": no drafter can pay"
    progress.say(
        f"breakeven: {tps:g} tok/s plain and {ms:g} ms a cycle: a drafter must reach an acceptance length of {needed:.2f} of at "
        f"most {steps + 1} with {steps} draft steps{hope}"
    )
    result = Breakeven(arithmetic=needed)
    run.of("breakeven").write_json("breakeven.json", result.model_dump())
    return Outcome(facts=result.model_dump())
