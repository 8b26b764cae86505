"""Prompts of the benchmarks that run a model with text of its own, as token ids."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from support.replay_data import Recording, category_of, choose, read_lines


def demo_chats(model: str) -> dict[str, list[int]]:
    """Return the demo's prompts by name, as chats of `model`."""
    from transformers import AutoTokenizer

    from vllm_trie.lab.demo import chat_prompts
    from vllm_trie.lab.tiny_model import chat_prompts as prompts_about_code
    from vllm_trie.lab.tiny_model import model_path

    tokenizer = AutoTokenizer.from_pretrained(model)
    source = prompts_about_code if Path(model) == model_path() else chat_prompts
    return {
        prompt.name: prompts_about_code.chat_tokens(tokenizer, prompt.message)
        for prompt in source.chat_prompts()
    }


def spec_bench_chats(model: str, questions: Path) -> list[Recording]:
    """Return the first turns of Spec-Bench's questions as chats of `model`, without answers."""
    from transformers import AutoTokenizer

    from vllm_trie.lab.tiny_model.chat_prompts import chat_tokens

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        Recording(
            question["question_id"],
            category_of(question),
            chat_tokens(tokenizer, question["turns"][0]),
            [],
        )
        for question in read_lines(questions)
    ]


def chats_by_category(model: str, questions: Path, number: int) -> dict[str, list[list[int]]]:
    """Return the first turns of `number` questions of each category, as chats of `model`."""
    chats = choose(spec_bench_chats(model, questions), number, None)
    return {
        category: [chat.prompt for chat in group]
        for category, group in itertools.groupby(chats, lambda chat: chat.category)
    }


def code_prompts(model: str) -> dict[str, list[list[int]]]:
    """Return prompts about code by set, as they are for the shipped model.

    `tasks`: two of each kind of task that it was trained on, from modules that training never saw;
    `edit`, `question`, `write`, `continue`: written by hand, unlike the training documents.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = json.loads(Path(__file__).with_name("code_prompts.json").read_text(encoding="utf-8"))
    return {name: [tokenizer.encode(text) for text in group] for name, group in texts.items()}


def prompt_sets(model: str) -> dict[str, list[list[int]]]:
    """Return all prompts by set.

    `demo`: the demo's; those of `code_prompts`; `library`: those of the engine tests.
    """
    from tests.engine.prompts import prompts as library_prompts

    return {
        "demo": list(demo_chats(model).values()),
        **code_prompts(model),
        "library": [prompt["prompt_token_ids"] for prompt in library_prompts()],
    }
