"""What equal tokens and equal seconds of training are worth, without Ray: ours beside SpecForge's trainer.

    python tests/benchmarks/learning.py RUN --tokens 8192

RUN is a run folder whose `extract` and `vocab` are done; its settings decide learning rate, epochs and unroll steps for both.
SpecForge starts as its trainer does (random weights, the target's embedding) on the same conversations, the same supervised
positions and the same vocabulary map, with its own optimizer. It runs twice: for as many tokens as ours, and for as many
seconds. Compilation is warmed up before the clock starts. The score is the predicted acceptance length over held-out and
validation conversations.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from ray_eagle.drafter.model import Drafter
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.hidden_states.schema import Sample
from ray_eagle.probing.predict import predict, predicted_length
from ray_eagle.run import RunFolder
from ray_eagle.settings import load_config
from ray_eagle.target.loading import head_and_embedding, read_facts
from ray_eagle.training.loop import Trainer, TrainJob
from tests.benchmarks import peers

LENGTH = 128
"""Rows of a padded batch are a multiple of this long, so that few lengths compile."""
WARM_UP = 12
"""Batches before the clock starts."""


class Run:
    """A run folder and what both trainers share."""

    def __init__(self, folder: str, tokens: int, epochs: int | None) -> None:
        run = RunFolder.open(folder)
        config = load_config(f"{folder}/run.yaml").config
        changes = {
            "use_gpu": torch.cuda.is_available(),
            "tokens_per_pack": tokens,
            "epochs": epochs or config.train.epochs,
            "trackers": (),
        }
        self.config = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        self.job = TrainJob(self.config, run, read_facts(config.target))
        self.data = HiddenStates(run.of("extract"), "train").by_id()
        self.held_out = [s for split in ("validation", "held_out") for s in HiddenStates(run.of("extract"), split)]

    def score(self, drafter: Drafter, embedding_VH: Tensor, draft_head_DH: Tensor) -> float:
        return predicted_length(
            predict(drafter, self.held_out, embedding_VH, draft_head_DH, self.config.train.unroll_steps)
        )


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ours(run: Run) -> tuple[Trainer, float]:
    """Train to the end. The trainer, and its seconds."""
    warm = Trainer(run.job)
    for _ in range(WARM_UP):
        warm.train_step()
    warm.close()
    trainer = Trainer(run.job)
    wait()
    start = time.perf_counter()
    while trainer.step < trainer.total_steps:
        trainer.train_step()
    wait()
    return trainer, time.perf_counter() - start


def padded(samples: list[Sample], hidden: int, device: torch.device) -> dict[str, Tensor]:
    """SpecForge's batch: a row a conversation, token and teacher one ahead, teacher states where the dataset has them."""
    length = -(-max(len(s.input_ids) for s in samples) // LENGTH) * LENGTH
    size = (len(samples), length)
    tokens_BT = torch.zeros(size, dtype=torch.int64)
    mask_BT, real_BT = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    aux_BTC = torch.zeros(*size, 3 * hidden, dtype=torch.bfloat16)
    last_BTH = torch.zeros(*size, hidden, dtype=torch.bfloat16)
    for row, sample in enumerate(samples):
        count = len(sample.input_ids)
        supervised = sample.loss_mask.bool()
        tokens_BT[row, : count - 1] = sample.input_ids[1:]
        real_BT[row, :count] = 1
        mask_BT[row, : count - 2] = sample.loss_mask[2:]
        aux_BTC[row, :count] = sample.aux
        at = supervised.nonzero()[:, 0]
        at = at[at > 0] - 1  # the states that predict a supervised token
        last_BTH[row, (at - 1)[at > 0]] = sample.last[at > 0]
    batch = {
        "input_ids": tokens_BT, "attention_mask": real_BT, "loss_mask": mask_BT[..., None], "hidden_states": aux_BTC,
        "target_hidden_for_compact": last_BTH,
    }  # fmt: skip
    return {name: tensor.to(device) for name, tensor in batch.items()}


def groups(run: Run, rows: int, epochs: float) -> Iterator[list[int]]:
    """Random rows, as a shuffling loader gives them."""
    count, done = len(run.data), 0
    generator = torch.Generator().manual_seed(run.config.seed)
    while done < epochs * count:
        order = torch.randperm(count, generator=generator).tolist()
        for first in range(0, count, rows):
            if done >= epochs * count:
                return
            yield order[first : first + rows]
            done += rows


def specforge(run: Run, trainer: Trainer, lr: float, epochs: float) -> tuple[Drafter, float]:
    """The drafter after so many epochs, and the seconds."""
    settings, shape = run.config.train, trainer.drafter.shape
    rows = round(settings.tokens_per_pack / (sum(run.data.lengths()) / len(run.data)))
    steps = sum(1 for _ in groups(run, rows, epochs))
    head_VH = head_and_embedding(run.job.facts)[0].to(trainer.device, torch.bfloat16)
    sizes = peers.llama_config(
        vocab_size=shape.vocab_size, draft_vocab_size=shape.draft_vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim, rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings, rope_parameters=shape.rope_parameters,
    )  # fmt: skip
    seconds = 0.0
    for warm in (True, False):
        model, optimizer = peers.specforge_trainer(
            sizes, trainer.embedding_VH, trainer.drafter.t2d, settings.unroll_steps, lr=lr, total_steps=steps,
            attention="flex_attention" if torch.cuda.is_available() else "sdpa",
        )  # fmt: skip
        wait()
        start = time.perf_counter()
        wanted = list(groups(run, rows, epochs))
        for samples in run.data.batches(wanted[:WARM_UP] if warm else wanted):
            batch = padded(samples, shape.hidden_size, trainer.device)
            losses = model(**batch, target=None, target_head_weight=head_VH)[0]
            sum(peers.DECAY**k * loss for k, loss in enumerate(losses)).backward()
            optimizer.step()
        wait()
        seconds = time.perf_counter() - start
    drafter = Drafter(shape).to(trainer.device)
    named = {
        name: tensor.float() for name, tensor in model.draft_model.state_dict().items() if "embed_tokens" not in name
    }
    named |= {"d2t": trainer.drafter.d2t, "t2d": trainer.drafter.t2d}
    own = drafter.state_dict()
    drafter.load_state_dict({name: named[name].to(tensor.dtype) for name, tensor in own.items()})
    drafter.inverse_frequencies = drafter.inverse_frequencies.to(trainer.device)
    return drafter, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step, for both")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--peer-lr", type=float, nargs="+", help="SpecForge's learning rates; default: the run's")
    arguments = parser.parse_args()
    run = Run(arguments.run, arguments.tokens, arguments.epochs)
    epochs = run.config.train.epochs
    print(f"{len(run.data)} conversations, {sum(run.data.lengths()):,} tokens; {len(run.held_out)} to score")
    print("| tool | tokens seen | seconds | predicted acceptance length |")
    print("| --- | --- | --- | --- |")
    trainer, budget = ours(run)
    seen = epochs * sum(run.data.lengths())

    def row(name: str, drafter: Drafter, tokens: float, seconds: float) -> None:
        score = run.score(drafter, trainer.embedding_VH, trainer.draft_head_DH)
        print(f"| {name} | {tokens:,.0f} | {seconds:.1f} | {score:.3f} |", flush=True)

    row("ray_eagle", trainer.drafter, seen, budget)
    for lr in arguments.peer_lr or [run.config.train.lr]:
        drafter, seconds = specforge(run, trainer, lr, epochs)
        row(f"SpecForge 0.2.0, lr {lr:g}", drafter, seen, seconds)
        share = min(1.0, budget / seconds)
        drafter, seconds = specforge(run, trainer, lr, epochs * share)
        row(f"SpecForge 0.2.0, lr {lr:g}, equal seconds", drafter, seen * share, seconds)
    trainer.close()


if __name__ == "__main__":
    main()
