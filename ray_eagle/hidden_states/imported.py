"""Stage `extract` with `states.path`: an actor that reads what another project captured, in the place of one that runs the target.

Only the target's head (and, where the last states were taken before it, its final norm) is computed, for the teacher's choice
and log-sum-exp. Everything else is the extraction's: units, commits, resume, samples set aside.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ray_eagle.config import Config, ExtractConfig, StatesConfig, TargetConfig
from ray_eagle.errors import DatasetError, InputError, explain
from ray_eagle.hidden_states.extractor import Extractor, Shelf, stored_aux, stored_teacher
from ray_eagle.hidden_states.loose import LooseSample, read_sample
from ray_eagle.hidden_states.plan import TokenSample
from ray_eagle.hidden_states.staging import Staging
from ray_eagle.run import Folder
from ray_eagle.target.capture import StageOutput, teacher, to_device
from ray_eagle.target.loading import TargetFacts, choose_dtype, head_and_embedding, take_device

Norm = Literal["after", "before"]
TRIED = 512
"""Positions at which the norm is measured."""
KNOWN = 0.9
"""States that predict their own next tokens no better than this share of a uniform guess, in nats, are not the target's."""
ROUNDING = 0.02
"""How far 16 bits move the root mean square of a normed state from 1."""


@dataclass(frozen=True)
class Head:
    """The end of a target: final norm and head."""

    norm_H: Tensor
    eps: float
    head: nn.Linear
    facts: TargetFacts

    @staticmethod
    def of(facts: TargetFacts, dtype: torch.dtype, device: torch.device) -> "Head":
        """Read by key from the target's safetensors. Raises TargetError as `head_and_embedding` does."""
        head_VH, _, norm_H = head_and_embedding(facts)
        head = nn.Linear(1, 1, bias=False, device="meta")
        head.weight = nn.Parameter(head_VH.to(device, dtype), requires_grad=False)
        return Head(norm_H.to(device), facts.rms_norm_eps, head, facts)

    def normed(self, last_SH: Tensor) -> Tensor:
        """After the final RMSNorm."""
        return rms_norm(last_SH.float(), self.norm_H.shape, self.norm_H.float(), self.eps).to(last_SH.dtype)

    def normed_share(self, last_SH: Tensor) -> float:
        """How many states have a root mean square of 1 once the norm's weight is divided out."""
        there = self.norm_H.float().abs() > ROUNDING
        size_S = (last_SH.float()[:, there] / self.norm_H.float()[there]).square().mean(-1).sqrt()
        return float(((size_S - 1).abs() < ROUNDING).float().mean())

    def teach(self, last_SH: Tensor) -> tuple[Tensor, Tensor]:
        """[S] int32 top-1 and [S] float32 log-sum-exp."""
        return teacher(self.head, last_SH, self.facts.logits)

    def surprise(self, last_SH: Tensor, next_S: Tensor) -> float:
        """Mean negative log-likelihood of the tokens that follow, in nats."""
        _, lse_S = self.teach(last_SH)
        output_S = (last_SH.float() * self.head.weight[next_S].float()).sum(-1)
        return float((lse_S - self.facts.logits.apply_(output_S)).mean())


class Importer(Extractor):
    """Reads states; takes units as an `Extractor` does."""

    def __init__(
        self,
        target: TargetConfig,
        facts: TargetFacts,
        settings: ExtractConfig,
        folder: Folder,
        name: str,
        states: StatesConfig,
        norm: Norm,
    ) -> None:
        self.device = take_device(settings.cpus, settings.gpus)
        self.facts, self.settings, self.states, self.norm = facts, settings, states, norm
        self.dtype = choose_dtype(target.dtype, self.device)
        self.head = Head.of(facts, self.dtype, self.device)
        dtype = str(self.dtype).removeprefix("torch.")
        not_finite = f"the file's hidden states are NaN or infinite, read as {dtype}: make it again, or leave it out"
        self._prepare(Shelf(facts, settings, folder, Staging(self.device), name, not_finite))

    @torch.inference_mode()
    def capture(self, samples: Sequence[TokenSample]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """As the extractor's, of the samples' files. Raises DatasetError for a file that has other tokens by now."""
        read = [self._read(sample) for sample in samples]
        aux_TC = torch.cat(
            [
                to_device(x.aux_TC[: len(s.input_ids)].to(self.dtype), self.device)
                for s, x in zip(samples, read, strict=True)
            ]
        )
        last_SH = torch.cat(
            [to_device(x.last_TH[_rows(s)].to(self.dtype), self.device) for s, x in zip(samples, read, strict=True)]
        )
        if self.norm == "before":
            last_SH = self.head.normed(last_SH)
        layers = dict(zip(self.facts.aux_layers, aux_TC.chunk(3, dim=1), strict=True))
        output = StageOutput(None, layers, last_SH, *self.head.teach(last_SH))
        return stored_teacher(output, self.settings.state_dtype), stored_aux(output, self.settings.state_dtype)

    def _read(self, sample: TokenSample) -> LooseSample:
        found = read_sample(Path(self.states.path), sample.source_id, self.facts.hidden_size)
        if found.ids_T[: len(sample.input_ids)].tolist() != [*sample.input_ids]:
            raise DatasetError(
                f"{Path(self.states.path) / sample.source_id}: expected the tokens that it had in stage generate, found others. "
                "Redo it: `ray-eagle generate --redo`."
            )
        return found


@torch.inference_mode()
def find_norm(config: Config, facts: TargetFacts, samples: Sequence[TokenSample]) -> tuple[Norm, str]:
    """Whether the last states were taken after or before the final norm, and how that shows, in words.

    States after an RMSNorm have a root mean square of 1 once its weight is divided out; others do not. Then the head must
    predict the tokens that follow. Raises InputError when it does not, and when states.norm says the other one.
    """
    head = Head.of(facts, torch.float32, torch.device("cpu"))
    given, following = [], []
    tried = 0
    for sample in samples:
        rows = _rows(sample)[: TRIED - tried]
        found = read_sample(Path(config.states.path), sample.source_id, facts.hidden_size)
        states = found.last_TH[rows].float()
        finite = states.isfinite().all(-1)  # extraction sets the others aside
        given.append(states[finite])
        following.append(found.ids_T[rows + 1][finite])
        tried += int(finite.sum())
        if tried >= TRIED:
            break
    if not tried:
        raise _other(config, "last states that are finite numbers", "NaN or infinite ones alone")
    last_SH, next_S = torch.cat(given), torch.cat(following)
    share = head.normed_share(last_SH)
    found_norm: Norm = "after" if share > 0.5 else "before"
    told = f"{share:.0%} of {len(last_SH)} states have the size that the norm gives them"
    wanted = config.states.norm
    if wanted not in ("auto", found_norm):
        raise _other(config, f"last states taken {wanted} the final norm (states.norm)", told)
    surprise = head.surprise(last_SH if found_norm == "after" else head.normed(last_SH), next_S)
    if not surprise < KNOWN * math.log(facts.vocab_size):
        text = f"{surprise:.1f} nats a token, a blind guess has {math.log(facts.vocab_size):.1f}"
        raise _other(config, "states from which the target's head predicts the tokens that follow", text)
    return found_norm, told


def _rows(sample: TokenSample) -> Tensor:
    """[S]: positions that predict a supervised token."""
    return torch.tensor(sample.loss_mask[1:]).nonzero()[:, 0]


def _other(config: Config, expected: str, told: str) -> InputError:
    return InputError(
        explain(
            "hidden states",
            where=config.states.path,
            expected=expected,
            found=told,
            fix="Check target.path (the very model that made them), states.norm, and that masks and tokens belong to the states.",
        )
    )
