"""What the tools call a drafter's tensors. Here every tensor goes by SGLang's name (`midlayer.*`).

SpecForge, TorchSpec, ModelOpt and AQ-MedAI write `midlayer.*`, speculators and vLLM `layers.0.*`; some put `model.` before
all or some of the names; SGLang's first per-state norms were called `aux_norm_low`, `_mid` and `_high`.
"""

from collections.abc import Collection
from dataclasses import dataclass

MIDLAYER = "midlayer."
LAYER_0 = "layers.0."
MODEL = "model."
EMBEDDING = "embed_tokens.weight"
FORMER = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


@dataclass(frozen=True)
class Naming:
    """How one file calls its tensors."""

    layer: str
    """`midlayer.` or `layers.0.`: what most of the layer's names begin with."""
    prefix: bool
    """Whether `model.` stands before any of them."""

    def here(self, name: str) -> str:
        """SGLang's name of a tensor that the file calls `name`; one that no drafter has where it belongs to no convention."""
        bare = name.removeprefix(MODEL)
        if bare.startswith(self.layer):
            return MIDLAYER + bare.removeprefix(self.layer)
        if bare.startswith((MIDLAYER, LAYER_0)):
            return f"mixed:{name}"  # the other convention, in the same file: nobody reads that
        stem, dot, rest = bare.partition(".")
        return FORMER.get(stem, stem) + dot + rest

    def there(self, name: str) -> str:
        """What the file would call the tensor that SGLang calls `name` (without `model.`)."""
        return self.layer + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def naming_of(names: Collection[str], *, speculators: bool) -> Naming:
    """The naming of a file by its names; of a file with names of both kinds, that of the tool that wrote config.json."""
    bare = [name.removeprefix(MODEL) for name in names]
    kinds = {kind for kind in (MIDLAYER, LAYER_0) if any(name.startswith(kind) for name in bare)}
    usual = LAYER_0 if speculators else MIDLAYER
    layer = kinds.pop() if len(kinds) == 1 else usual
    return Naming(layer, any(name.startswith(MODEL) for name in names))
