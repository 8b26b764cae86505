"""The demo's prompts for a chat model: work on a text, work on code, and something new."""

from __future__ import annotations

from vllm_trie.lab.tiny_model.chat_prompts import INVENTORY, ChatPrompt

_LETTER = (
    "Dear Ms. Keller,\n"
    "thank you for your order of three garden chairs. The chairs left our house on Monday and will "
    "reach you within five working days. If a chair is damaged, please send it back at our cost "
    "and we will replace it at once.\n"
    "With kind regards,\nTom Brandt, Brandt & Sons"
)
_HISTORY = (
    "The lighthouse of Marden was built in 1871 after two ships were lost on the reef in one "
    "winter. Its first keeper was Ada Holm, who lived there with her family for thirty years. The "
    "lamp burned oil until 1923, when a cable from the mainland brought electricity. Since 1988 "
    "the light has been automatic, and the keeper's house is now a small museum that is open from "
    "May to September."
)
_MINUTES = (
    "Monday's meeting: Rosa will order the new printer by Friday. Ken will call the landlord about "
    "the broken window. Lee will write the report on the spring sale and send it to Rosa."
)


def chat_prompts() -> list[ChatPrompt]:
    """Return the prompts; the first answers repeat much of their context, the last ones little."""
    return [
        ChatPrompt(
            "edit code",
            f"Here is my class:\n\n```python\n{INVENTORY}```\n\nShow me the whole class again with "
            "`items` renamed to `stock`.",
        ),
        ChatPrompt("rewrite a letter", f"{_LETTER}\n\nRewrite this letter for Mr. Olsen."),
        ChatPrompt(
            "answer from a text",
            f"{_HISTORY}\n\nWho was the first keeper, and what is the keeper's house today?",
        ),
        ChatPrompt("summarize", f"{_HISTORY}\n\nSummarize this text in two sentences."),
        ChatPrompt("list the tasks", f"{_MINUTES}\n\nMake a list of the tasks, one for a person."),
        ChatPrompt("write something new", "Explain why leaves turn yellow and red in autumn."),
    ]
