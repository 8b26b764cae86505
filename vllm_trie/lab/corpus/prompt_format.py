"""How a model is asked: its chat template, cut into the parts around a question."""

from __future__ import annotations

from typing import Any, NamedTuple

_QUESTION = "vllm-trie-question"
"""Stands for a question while the template is cut."""


class PromptFormat(NamedTuple):
    """The text around a question.

    A base model has none: it writes an opening after its beginning-of-text token, and goes on.
    """

    tokenizer: Any
    is_chat: bool
    head: str
    """From the beginning of the prompt to where the user's turn begins."""
    tail: str
    """From the end of the user's turn to where the answer begins."""

    @property
    def question_prompt(self) -> list[int]:
        """Return the tokens after which the model writes a question itself."""
        if self.is_chat:
            return self._encode(self.head)
        start = self.tokenizer.bos_token_id
        return [self.tokenizer.eos_token_id if start is None else start]

    def answer_prompt(self, question: str) -> list[int]:
        """Return the tokens after which the model answers."""
        if self.is_chat:
            return self._encode(self.head + question + self.tail)
        return [*self.question_prompt, *self._encode(question)]

    @property
    def question_ends(self) -> dict[str, Any]:
        """Return what ends a question, as sampling parameters; an EOS token always does."""
        tail = self._encode(self.tail.lstrip())
        if not tail:
            return {}
        first = tail[0]
        if first in self.tokenizer.all_special_ids:
            return {"stop_token_ids": [first]}
        return {"stop": [self.tail.split()[0]]}

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def prompt_format(tokenizer: Any) -> PromptFormat:
    """Return the format of a Hugging Face tokenizer's model.

    Raises:
        ValueError: The chat template changes the question, or the model has neither a chat template
            nor a token that begins a text.
    """
    if not tokenizer.chat_template:
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise ValueError(
                "the model has neither a chat template nor a beginning-of-text token, so it cannot "
                "write questions itself; name your own with --prompts"
            )
        return PromptFormat(tokenizer, False, "", "")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _QUESTION}], tokenize=False, add_generation_prompt=True
    )
    head, separator, tail = text.partition(_QUESTION)
    if not separator:
        raise ValueError(
            "the model's chat template does not show the user's message as it is; build a corpus "
            "from recorded answers with `vllm-trie corpus build`"
        )
    return PromptFormat(tokenizer, True, head, tail)
