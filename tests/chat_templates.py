"""Nine ways in which models write conversations, as small templates of our own, each with a tokenizer and what it must give.

They keep what matters for a mask: where an answer begins and ends, what happens to reasoning of earlier turns, how tools are
called, which end-of-turn marks there are, and whether a system text is written that nobody asked for.
"""

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INJECTING = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}<|eom_id|>{% else %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\\n') }}\n</think>\n\n{{ m.content.lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK_R1 = (
    "<|bos|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool_out|>{{ m.content }}<|/tool_out|>"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<|tool_call|>{{ c.function | tojson }}{% endfor %}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
KIMI = (
    "{% for m in messages %}<|im_{{ 'system' if m.role == 'tool' else m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|calls_begin|>{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|calls_end|>{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function | tojson }}{% endfor %}</s>"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% set ns = namespace(before='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.before = m.content + '\n\n' %}{% else %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{% if m.role == 'user' %}{{ ns.before }}{% set ns.before = '' %}{% endif %}{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.<|end|>{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and (loop.last or m.tool_calls) %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "<think>{{ (m.reasoning_content or '') if loop.index0 > ns.last else '' }}</think>\n{{ m.content.strip() }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% else %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class Style:
    template: str
    specials: tuple[str, ...]
    stops: tuple[str, ...]
    """The first is the tokenizer's eos_token."""


IM = ("<|im_start|>", "<|im_end|>")
STYLES = {
    "chatml": Style(CHATML, (*IM,), ("<|im_end|>",)),
    "injecting": Style(INJECTING, (*IM,), ("<|im_end|>",)),
    "llama3": Style(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ("<|eot_id|>", "<|eom_id|>"),
    ),
    "qwen3": Style(QWEN3, (*IM, "<think>", "</think>", "<tool_call>", "</tool_call>"), ("<|im_end|>",)),
    "deepseek-r1": Style(
        DEEPSEEK_R1,
        (
            "<|bos|>",
            "<|eos|>",
            "<|User|>",
            "<|Assistant|>",
            "<think>",
            "</think>",
            "<|tool_call|>",
            "<|tool_out|>",
            "<|/tool_out|>",
        ),
        ("<|eos|>",),
    ),
    "kimi": Style(
        KIMI,
        (
            *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
            *("<|calls_begin|>", "<|calls_end|>", "<think>", "</think>"),
        ),
        ("<|im_end|>",),
    ),
    "mistral": Style(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ),
        ("</s>",),
    ),
    "gemma": Style(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<eos>", "<end_of_turn>")),
    "harmony": Style(
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
    ),
    "glm": Style(
        GLM,
        (
            "[gMASK]",
            "<sop>",
            "<|endoftext|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<|system|>",
            "<think>",
            "</think>",
        ),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
}


def make_tokenizer(template: str, specials: tuple[str, ...], eos: str) -> PreTrainedTokenizerFast:
    """Bytes, with merges of line ends, blanks and letters, so that texts cut elsewhere give other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    n, blank = "\u010a", "\u0120"  # how ByteLevel writes a line end and a blank
    merges = [
        (n, n),
        (n + n, n),
        (blank, "t"),
        ("t", "h"),
        ("h", "e"),
        (blank, blank),
        (n, blank),
        (">", n),
        ("i", "s"),
    ]
    vocab = {token: i for i, token in enumerate([*alphabet, *dict.fromkeys(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    fast.add_special_tokens({"additional_special_tokens": [token for token in specials if token != eos]})
    fast.chat_template = template
    return fast


def tokenizer_of(style: str) -> PreTrainedTokenizerFast:
    made = STYLES[style]
    return make_tokenizer(made.template, made.specials, made.stops[0])


def stops_of(style: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(stop) for stop in STYLES[style].stops]
