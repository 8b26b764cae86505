"""Tasks whose answer is a sentence or new code, not a copy of the context.

Some have no context at all, some one that does not hold the answer; they keep a model that is
good at copying from doing nothing else.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.tiny_model.data.excerpts import IDENTIFIER, Excerpt, Function, first_sentence


@dataclass(frozen=True)
class Question:
    """A question about ``context`` (code or text; None if there is none) and its answer.

    ``is_code`` says whether the answer is code, to be fenced where the context is.
    """

    question: str
    context: str | None
    answer: str
    is_code: bool = False


Names = Sequence[str]
Builder = Callable[[Excerpt, Excerpt, random.Random, Names], Question | None]
"""(excerpt, an unrelated excerpt, random numbers, names to invent from)"""


def quoted_list(names: Sequence[str]) -> str:
    """``a``, ``b`` and ``c`` in backticks."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1]


def _a_function(excerpt: Excerpt, rng: random.Random) -> Function | None:
    function = rng.choice(excerpt.functions)
    same = [f for f in excerpt.functions if f.name == function.name]
    return function if len(same) == 1 else None


def parameters(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    function = _a_function(excerpt, rng)
    if function is None:
        return None
    phrases = (
        "Which parameters does `{0}` take?", "What are the parameters of `{0}`?",
        "List the arguments of `{0}`.", "What do I have to pass to `{0}`?",
    )  # fmt: skip
    found = [p.lstrip("*") for p in function.parameters]
    takes = quoted_list(found) if found else "no parameters"
    answer = f"`{function.name}` takes {takes}."
    return Question(rng.choice(phrases).format(function.name), excerpt.source, answer)


def returned_value(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    function = _a_function(excerpt, rng)
    if function is None:
        return None
    values = [
        ast.unparse(node.value)
        for node in ast.walk(function.node)
        if isinstance(node, ast.Return) and node.value is not None
    ]
    if any(len(value) > 80 or "\n" in value for value in values) or len(set(values)) > 1:
        return None
    phrases = (
        "What does `{0}` return?",
        "What is the return value of `{0}`?",
        "What comes out of `{0}`?",
    )
    answer = f"It returns `{values[0]}`." if values else "It returns nothing."
    return Question(rng.choice(phrases).format(function.name), excerpt.source, answer)


def called_names(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    function = _a_function(excerpt, rng)
    if function is None:
        return None
    calls: list[str] = []
    for node in ast.walk(function.node):
        if isinstance(node, ast.Call):
            name = re.split(r"\W", ast.unparse(node.func))[-1]
            if name and name not in calls:
                calls.append(name)
    if len(calls) > 5:
        return None
    calls.sort(key=function.source.find)
    phrases = ("Which functions does `{0}` call?", "What does `{0}` call?")
    answer = f"`{function.name}` calls {quoted_list(calls) if calls else 'nothing'}."
    return Question(rng.choice(phrases).format(function.name), excerpt.source, answer)


def count_functions(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    found = [f.name for f in excerpt.functions]
    phrases = (
        "How many functions are there?", "Which functions are defined here?",
        "List the functions.", "What are the functions called?",
    )  # fmt: skip
    if len(found) == 1:
        answer = f"There is one function: `{found[0]}`."
    else:
        answer = f"There are {len(found)} functions: {quoted_list(found)}."
    return Question(rng.choice(phrases), excerpt.source, answer)


def uses_name(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    words = set(IDENTIFIER.findall(excerpt.source))
    phrases = (
        "Does the code use `{0}`?",
        "Is `{0}` used here?",
        "Does the name `{0}` appear in this code?",
    )
    if rng.random() < 0.5:
        name = rng.choice(sorted(word for word in words if len(word) > 2) or ["self"])
        users = [f.name for f in excerpt.functions if re.search(rf"\b{name}\b", f.source)]
        if not users or len(users) > 4:
            return None
        answer = f"Yes, it is used in {quoted_list(users)}."
    else:
        absent = sorted(set(IDENTIFIER.findall(other.source)) - words) or list(names[:1])
        name = rng.choice(absent)
        answer = f"No, `{name}` does not appear in the code."
    return Question(rng.choice(phrases).format(name), excerpt.source, answer)


def purpose(excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names) -> Question | None:
    """What a function is for: its docstring's first sentence, or that it is not defined here."""
    phrases = (
        "What does `{0}` do?", "What is `{0}` for?", "Explain `{0}` in one sentence.",
        "Tell me what `{0}` does.",
    )  # fmt: skip
    if rng.random() < 0.35:
        name = rng.choice(other.functions).name
        if name in excerpt.source:
            return None
        answer = f"The code does not define `{name}`."
    else:
        function = _a_function(excerpt, rng)
        sentence = first_sentence(function.docstring) if function else None
        if function is None or sentence is None:
            return None
        name, answer = function.name, sentence
    return Question(rng.choice(phrases).format(name), excerpt.source, answer)


def find_passage(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    """Numbered notes, one of which answers the question; or none does."""
    notes = {}
    for function in excerpt.functions + other.functions:
        text = " ".join((function.docstring or "").split("\n\n")[0].split())
        if 20 < len(text) < 400:
            notes[function.name] = text
    if len(notes) < 2:
        return None
    order = sorted(notes)
    rng.shuffle(order)
    asked = order[0]
    missing = rng.random() < 0.2
    shown = sorted(order[1:] if missing else order)
    rng.shuffle(shown)
    context = "\n".join(f"[{i}] {name}: {notes[name]}" for i, name in enumerate(shown, 1))
    phrases = (
        "What do the notes say about `{0}`?", "According to the notes, what does `{0}` do?",
        "Answer from the notes: what is `{0}`?", "Quote the note on `{0}`.",
    )  # fmt: skip
    answer = (
        f"The notes say nothing about `{asked}`."
        if missing
        else f"{notes[asked]} [{shown.index(asked) + 1}]"
    )
    return Question(rng.choice(phrases).format(asked), context, answer)


def summarize_text(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    for function in excerpt.functions:
        text, sentence = function.docstring or "", first_sentence(function.docstring)
        if sentence and 200 < len(text) < 1200:
            phrases = (
                "Summarize this text in one sentence.", "What is this text about?",
                "Give the gist of the text.", "TL;DR?",
            )  # fmt: skip
            return Question(rng.choice(phrases), text.strip(), sentence)
    return None


def _request(function: Function, rng: random.Random) -> str | None:
    sentence = first_sentence(function.docstring)
    if sentence is None or len(function.source) > 900:
        return None
    call = f"{function.name}({', '.join(function.parameters)})"
    phrases = (
        "Write the function `{0}`. {1}", "Write a Python function `{0}`: {1}",
        "I need a function `{0}`. {1}", "Implement `{0}`. {1}",
        "Please write `{0}`. It should do this: {1}",
    )  # fmt: skip
    return rng.choice(phrases).format(call, sentence)


def write_function(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    """Write a function from its signature and first sentence; nothing to copy from."""
    function = rng.choice(excerpt.functions)
    request = _request(function, rng)
    return Question(request, None, function.source, True) if request else None


def write_unrelated(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    """The same after code that has nothing to do with it."""
    function = rng.choice(excerpt.functions)
    request = _request(function, rng)
    return Question(request, other.source, function.source, True) if request else None


def complete_function(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    """Half a function is shown, the whole is expected."""
    function = rng.choice(excerpt.functions)
    lines = function.source.split("\n")
    if len(lines) < 4:
        return None
    shown = "\n".join(lines[: rng.randrange(1, len(lines) - 1)])
    phrases = ("Complete the function.", "Finish this function.", "Write the rest of it.")
    return Question(rng.choice(phrases), shown, function.source, True)


def describe_known(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    """What a library function is for, from memory."""
    function = rng.choice(excerpt.functions)
    sentence = first_sentence(function.docstring)
    if sentence is None or "test" in excerpt.path:
        return None
    module = excerpt.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    owner = f"{module}.{excerpt.class_name}" if excerpt.class_name else module
    phrases = ("What does `{0}` do?", "What is `{0}` for?", "Explain `{0}`.")
    return Question(rng.choice(phrases).format(f"{owner}.{function.name}"), None, sentence)


_SMALL_TALK = (
    (("Hello", "Hi", "Hey there", "Good morning", "Hello!", "Hi, how are you?"),
     "Hello. Give me some Python code and tell me what to do with it."),
    (("Who are you?", "What are you?", "What can you do?", "Help", "How can you help me?",
      "What are you good at?"),
     "I am a very small language model that has read the Python standard library. "
     "I can repeat, rename, outline and explain code."),
    (("Thanks", "Thank you!", "Great, thanks.", "That is all, thank you.", "Bye"),
     "You are welcome."),
    (("What is the capital of France?", "Tell me a joke.", "Who won the match?",
      "What is the weather like?", "Write a poem about the sea.", "Translate this into German.",
      "What time is it?", "How old are you?", "What is love?", "Recommend a good book."),
     "I do not know. I have only read Python code."),
)  # fmt: skip


def small_talk(
    excerpt: Excerpt, other: Excerpt, rng: random.Random, names: Names
) -> Question | None:
    questions, answer = rng.choice(_SMALL_TALK)
    return Question(rng.choice(questions), None, answer)


QUESTIONS: dict[str, tuple[Builder, float]] = {
    "parameters": (parameters, 1.5),
    "returned_value": (returned_value, 1.5),
    "called_names": (called_names, 1.5),
    "count_functions": (count_functions, 1.5),
    "uses_name": (uses_name, 1.5),
    "purpose": (purpose, 2.5),
    "find_passage": (find_passage, 4.0),
    "summarize_text": (summarize_text, 2.0),
    "write_function": (write_function, 6.0),
    "write_unrelated": (write_unrelated, 4.0),
    "complete_function": (complete_function, 3.0),
    "describe_known": (describe_known, 2.0),
    "small_talk": (small_talk, 0.3),
}
"""Builders by kind, each with its sampling weight."""
