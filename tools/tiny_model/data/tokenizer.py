"""Byte-level BPE tokenizer whose pre-tokenizer keeps a line break and its indentation together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END, USER, ASSISTANT, SYSTEM = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, SYSTEM)
"""Token i of the vocabulary is ``SPECIAL_TOKENS[i]``; END closes files, answers and turns."""
END_ID = 0

# In this order: a digit; a word with the space before it; punctuation with the space before it;
# a line break with the next line's indentation but for the last space, which belongs to the
# word after it; other white space.
_PIECES = (
    r"[0-9]"
    r"| ?[A-Za-z_]+"
    r"| ?[^\sA-Za-z_0-9]+"
    r"|[^\S\n]*\n\s*(?=\s\S)"
    r"|[^\S\n]*\n\s*"
    r"|\s+(?!\S)"
    r"|\s+"
)

CHAT_TEMPLATE = (
    "{%- macro text(content) -%}"
    "{%- if content is string -%}{{ content | trim }}"
    "{%- else -%}{%- for part in content -%}{{ part['text'] | trim }}{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] in ('system', 'developer') -%}"
    "{{ '<|system|>' + text(message['content']) }}"
    "{%- elif message['role'] == 'user' -%}{{ '<|user|>' + text(message['content']) }}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{ '<|assistant|>' + text(message['content']) + '<|endoftext|>' }}"
    "{%- else -%}{{ raise_exception('the roles are system, user and assistant, got ' "
    "+ message['role']) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""Jinja; :func:`render_turns` is its readable twin."""


def render_turns(turns: Iterable[tuple[str, str]], add_generation_prompt: bool = False) -> str:
    """``[(role, text), ...]`` as the model reads it: each turn after its role's token."""
    markers = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
    text = "".join(
        markers[role] + content.strip() + (END if role == "assistant" else "")
        for role, content in turns
    )
    return text + (ASSISTANT if add_generation_prompt else "")


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges from ``texts``; the same texts in the same order give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END,
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
