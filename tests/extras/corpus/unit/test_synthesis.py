"""Synthesis with an engine that is no model: what is asked, what is kept, how a run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from vllm_trie.lab.corpus import held_out
from vllm_trie.lab.corpus.answers_file import Answer, AnswersFile
from vllm_trie.lab.corpus.prompt_format import PromptFormat, prompt_format
from vllm_trie.lab.corpus.synthesis import Completion, Plan, read_questions, synthesize

SETTINGS = {"model": "m", "seed": 1}


class Letters:
    """A tokenizer: a token a character, `<` ends a turn."""

    bos_token_id: int | None = 1
    eos_token_id = ord("<")
    all_special_ids = (1, ord("<"))
    chat_template: str | None = "yes"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(char) for char in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        [message] = messages
        return f"user:{message['content']}<model:"


class Echo:
    """Answers a prompt with its own end; writes the questions q0, q1, ... by their seeds."""

    def __init__(self, fails_after: int | None = None, unended: Sequence[int] = ()) -> None:
        self.answered: list[str] = []
        self.params: list[dict[str, Any]] = []
        self._fails_after = fails_after
        self._unended = unended

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]]
    ) -> Iterator[Completion]:
        for number, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
            self.params.append(options)
            text = "".join(map(chr, prompt))
            if not text.endswith("<model:"):
                question = options["seed"] % 1_000_003
                yield Completion(
                    number, [], f" q{question // 2 * 2}", question not in self._unended
                )
                continue
            if len(self.answered) == self._fails_after:
                raise KeyboardInterrupt
            self.answered.append(text.removeprefix("user:").removesuffix("<model:"))
            yield Completion(number, [ord(c) for c in text[-9:]], "", True)


def plan(num_tokens: int, questions_at_once: int = 8) -> Plan:
    return Plan(num_tokens, 0.0, 16, 32, seed=1, questions_at_once=questions_at_once)


def test_asks_itself_until_there_are_enough_tokens(tmp_path):
    engine, answers = Echo(unended=[4, 5]), AnswersFile(tmp_path / "a", SETTINGS)
    synthesize(engine, prompt_format(Letters()), plan(60), answers)
    # Questions of two seeds are the same here; each is asked once, and those without an end never.
    assert engine.answered == ["q0", "q2", "q6", "q8", "q10", "q12", "q14"]
    assert all(p == {**p, "temperature": 1.0, "stop_token_ids": [60]} for p in engine.params[:8])
    assert all(p["temperature"] == 0.0 and p["max_tokens"] == 32 for p in engine.params[8:11])


def test_an_interrupted_run_goes_on(tmp_path):
    path = tmp_path / "a"
    first = Echo(fails_after=3)
    with pytest.raises(KeyboardInterrupt):
        synthesize(first, prompt_format(Letters()), plan(100), AnswersFile(path, SETTINGS))
    with path.open("a") as file:
        file.write('{"index": 9, "question": "cut')  # as a killed process leaves it
    answers = AnswersFile(path, SETTINGS)
    assert [answer.question for answer in answers.answers] == first.answered
    second = Echo()
    synthesize(second, prompt_format(Letters()), plan(100), answers)
    assert set(first.answered).isdisjoint(second.answered)
    assert AnswersFile(path, SETTINGS).answers == answers.answers
    assert answers.num_tokens >= 100


def test_the_users_questions_are_asked_in_order_and_once(tmp_path):
    questions = [f"question {i}" for i in range(5)]
    engine, path = Echo(fails_after=3), tmp_path / "a"
    chat, answers = prompt_format(Letters()), AnswersFile(path, SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        synthesize(engine, chat, plan(1000, 2), answers, questions)
    again = Echo()
    answers = AnswersFile(path, SETTINGS)
    synthesize(again, chat, plan(1000, 2), answers, questions)
    assert engine.answered + again.answered == questions
    assert [answer.number for answer in answers.answers] == [0, 1, 2, 3, 4]


class Stuck(Echo):
    def complete(self, prompts: Any, params: Any) -> Iterator[Completion]:
        return super().complete(prompts, [{**options, "seed": 0} for options in params])


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Echo(unended=range(8)), r"none of 8 questions .* raise --question-tokens"),
        (Stuck(), "no new questions after 9 tokens"),
    ],
)
def test_a_model_without_enough_questions_is_an_error(tmp_path, engine, said):
    answers = AnswersFile(tmp_path / "a", SETTINGS)
    with pytest.raises(ValueError, match=said):
        synthesize(engine, prompt_format(Letters()), plan(1000), answers)


def test_answers_of_other_settings_are_refused(tmp_path):
    AnswersFile(tmp_path / "a", SETTINGS)
    with pytest.raises(ValueError, match=r"other settings \(seed 1, now 2\)"):
        AnswersFile(tmp_path / "a", {**SETTINGS, "seed": 2})
    for content in ("a letter\n", "a letter\nwithout an end", '{"settings": {}}\n{"cut'):
        (tmp_path / "b").write_text(content)
        with pytest.raises(ValueError, match=r"not a file of synthesized answers|other settings"):
            AnswersFile(tmp_path / "b", SETTINGS)
        assert (tmp_path / "b").read_text() == content


def test_files_of_questions(tmp_path):
    def read(content: str, suffix: str = ".jsonl") -> list[str]:
        path = tmp_path / f"questions{suffix}"
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        return read_questions(path)

    assert read("one\n\ntwo\none\n", ".txt") == ["one", "two"]
    assert read('{"prompt": "one"}\n{"turns": ["two", "more"]}\n') == ["one", "two"]
    assert read('{"question": "one"}\n{"text": "two"}\n') == ["one", "two"]
    assert read('{"text": "one\u2028line\x85"}\n') == ["one\u2028line\x85"]
    for content, message in (
        ("", "no question"),
        ("{", "line 1 is not JSON"),
        ('{"prompt": "a"}\n\n{"turns": [3]}', "line 3 has none"),
        ("[1]", "line 1 has none"),
        ("\udcff", "questions.jsonl is not UTF-8"),
    ):
        with pytest.raises(ValueError, match=message):
            read(content)


def test_base_models_begin_with_their_first_token():
    base = Letters()
    base.chat_template = None
    chat = prompt_format(base)
    assert chat.question_prompt == [1]
    assert chat.answer_prompt("ab") == [1, 97, 98]
    assert chat.question_ends == {}
    base.bos_token_id = None
    assert prompt_format(base).question_prompt == [ord("<")]


def test_a_template_that_hides_the_question_is_refused():
    class Shouts(Letters):
        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return super().apply_chat_template(messages).upper()

    with pytest.raises(ValueError, match="does not show the user's message"):
        prompt_format(Shouts())


def test_the_held_out_gain_is_that_of_answers_that_repeat():
    def answer(i: int, text: str) -> Answer:
        return Answer(i, f"question {i}", [ord(c) for c in text])

    chat = PromptFormat(Letters(), True, "", "?")
    same = [answer(i, f"{i} is a number, and so are all numbers below it") for i in range(20)]
    gain = held_out.measure(same, chat, 128)
    assert gain.with_corpus > 2 * gain.without
    different = [answer(i, "".join(chr(33 + i * 4 + k % 4) for k in range(40))) for i in range(20)]
    gain = held_out.measure(different, chat, 128)
    assert gain.with_corpus == pytest.approx(gain.without, rel=0.02)
    assert held_out.measure(same[:1], chat, 128) is None
