"""Predictions over HTTP: the answers stay the same, and the usage has their counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from transformers import AutoTokenizer

from tests.engine.chats import CHATS, SOURCE, chat, complete, joined
from tests.engine.prompts import texts
from tests.engine.serving import MODEL_NAME
from vllm_trie.lab.tiny_model import model_path

pytestmark = pytest.mark.slow

WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Answers:
    """The replies with and without predictions, and what is counted of the former."""

    replies: dict[bool, list[str]] = field(default_factory=dict)
    usages: list[Any] = field(default_factory=list)
    stopped: list[Any] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)
    survived: bool = False


class Client:
    """Asks with a prediction, or with neither that nor drafts."""

    def __init__(self, client: openai.OpenAI, predicts: bool) -> None:
        self._client = client
        self._predicts = predicts

    def chat(self, content: Any, extra_body: Any = (), **options: Any) -> Any:
        body = dict(extra_body)
        if self._predicts:
            options["prediction"] = {"type": "content", "content": content}
        else:
            body["vllm_xargs"] = {"speculation": False}
        return chat(self._client, CHATS[0], extra_body=body, **options)

    def chats(self, content: str) -> ChatCompletion:
        settings = {"max_tokens": 80, "temperature": 0.0}
        body: dict[str, Any] = {"model": MODEL_NAME, "messages": [CHATS[0]] * 2, **settings}
        if self._predicts:
            body["prediction"] = {"type": "content", "content": content}
        else:
            body["vllm_xargs"] = {"speculation": False}
        return self._client.post("/chat/completions/batch", cast_to=ChatCompletion, body=body)

    def complete(self, prompt: Any, predicted: str, **options: Any) -> Any:
        xargs = {"prediction": predicted} if self._predicts else {"speculation": False}
        return complete(self._client, prompt, extra_body={"vllm_xargs": xargs}, **options)

    def ask(self) -> tuple[list[str], list[Any]]:
        """Return the replies to requests of all kinds, and their usages."""
        parts = [{"type": "text", "text": SOURCE[:80]}, {"type": "text", "text": SOURCE[80:]}]
        whole = [self.chat(content) for content in (SOURCE, parts, "no such code")]
        several = self.chat(SOURCE, n=2, temperature=0.7, seed=3)
        answers = (*whole, several, self.chats(SOURCE))
        usages = [answer.usage for answer in answers]
        choices = [choice for answer in answers for choice in answer.choices]
        replies = [choice.message.content for choice in choices]
        chunks = list(self.chat(SOURCE, **WITH_USAGE))
        replies.append(joined(chunks, lambda c: c.delta.content)[0])
        usages.append(chunks[-1].usage)
        prompt = texts()[1]
        predicted = complete(self._client, prompt).choices[0].text
        completion = self.complete(prompt, predicted)
        chunks = list(self.complete(prompt, predicted, **WITH_USAGE))
        replies += [completion.choices[0].text, joined(chunks, lambda c: c.text)[0]]
        usages += [completion.usage, chunks[-1].usage]
        sampled: dict[str, Any] = {"n": 2, "temperature": 0.2, "seed": 3, **WITH_USAGE}
        chunks = list(self.complete([prompt] * 3, predicted, **sampled))
        texts_of = [""] * 6
        for chunk in chunks:
            for choice in chunk.choices:
                texts_of[choice.index] += choice.text
        return [*replies, *texts_of], [*usages, chunks[-1].usage]

    def ask_with_stops(self) -> tuple[list[str], list[Any]]:
        """Return the replies to requests whose predictions go on behind a stop, and their
        usages."""
        tokens = AutoTokenizer.from_pretrained(model_path()).encode(" =")
        replies, usages = [], []
        for stop in ({"stop": ["line in"]}, {"extra_body": {"stop_token_ids": tokens}}):
            whole = self.chat(SOURCE, **stop)
            chunks = list(self.chat(SOURCE, **stop, **WITH_USAGE))
            text = joined(chunks, lambda c: c.delta.content)[0]
            replies += [whole.choices[0].message.content, text]
            usages += [whole.usage, chunks[-1].usage]
        return replies, usages


BAD = (
    "a text",
    {"type": "content", "content": 5},
    {"type": "content", "content": [{"type": "image_url"}]},
    {"type": "content", "content": "word " * 9000},
)
"""Fields of chats."""
BAD_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"vllm_xargs": {"prediction": 5}},
    {"vllm_xargs": {"prediction": [10**9]}},
    {"vllm_xargs": {"prediction": "word " * 9000}},
    {"prediction": "text"},  # misplaced
)


def refused(ask: Callable[..., Any], *args: Any, **options: Any) -> tuple[int, str]:
    """Return status and message of a request that is refused."""
    with pytest.raises(openai.APIStatusError) as error:
        ask(*args, **options)
    return error.value.status_code, str(error.value)


def ask_badly(client: openai.OpenAI) -> list[tuple[int, str]]:
    respond = partial(client.responses.create, model=MODEL_NAME, input="Hello")
    replies = []
    for stream in (False, True):
        replies += [refused(chat, client, CHATS[0], prediction=bad, stream=stream) for bad in BAD]
        replies += [
            refused(complete, client, texts()[0], extra_body=bad, stream=stream)
            for bad in BAD_ARGUMENTS
        ]
        replies.append(refused(respond, extra_body=BAD_ARGUMENTS[2], stream=stream))
    return replies


@pytest.fixture(scope="module")
def answers(full_server):
    answers, client = Answers(), full_server.client()
    before, log = full_server.metrics(), len(full_server.log_text())
    for predicts in (True, False):
        replies, usages = Client(client, predicts).ask()
        answers.usages = answers.usages or usages
        answers.bad = answers.bad or ask_badly(client)
        answers.counted = answers.counted or {
            name: count - before.get(name, 0.0) for name, count in full_server.metrics().items()
        }
        stopped, usages = Client(client, predicts).ask_with_stops()
        answers.stopped = answers.stopped or usages
        answers.replies[predicts] = replies + stopped
    said = full_server.log_text()[log:]
    answers.survived = full_server.is_healthy() and "Traceback" not in said
    return answers


def test_same_replies(answers):
    assert answers.replies[True] == answers.replies[False]
    assert all(answers.replies[True])


def test_predictions_are_counted(answers):
    details = [usage.completion_tokens_details for usage in answers.usages]
    accepted = [counts.accepted_prediction_tokens for counts in details]
    rejected = [counts.rejected_prediction_tokens for counts in details]
    whole, parts, other, several, chats, streamed, completion, *streamed_completions = accepted
    assert min(whole, parts, streamed, several, chats) > 20
    assert other < 5
    assert min(completion, *streamed_completions) > 20
    assert max(rejected[-3:-1]) < 5
    counted = answers.counted
    assert counted["vllm:trie_accepted_prediction_tokens_total"] == sum(accepted)
    assert counted["vllm:trie_rejected_prediction_tokens_total"] == sum(rejected)


def test_predictions_are_counted_where_answers_stop(answers):
    for usage in answers.stopped:
        accepted = usage.completion_tokens_details.accepted_prediction_tokens
        assert accepted <= usage.completion_tokens


def test_bad_predictions_name_the_field(answers):
    assert answers.survived
    assert len(answers.bad) == 2 * (len(BAD) + len(BAD_ARGUMENTS) + 1)
    for status, message in answers.bad:
        assert status == 400
        assert "prediction" in message


def test_a_rendered_chat_has_its_prediction(full_server):
    """It travels as text, which the server that generates tokenizes."""
    prediction = {"type": "content", "content": SOURCE}
    settings = {"model": MODEL_NAME, "max_tokens": 80, "temperature": 0.0}
    body = {**settings, "messages": CHATS[0], "prediction": prediction}
    rendered = full_server.http.post("/v1/chat/completions/render", json=body).json()
    assert rendered["sampling_params"]["extra_args"] == {"prediction": SOURCE}
    before = full_server.metrics()
    assert full_server.http.post("/inference/v1/generate", json=rendered).status_code == 200
    accepted = "vllm:trie_accepted_prediction_tokens_total"
    assert full_server.metrics()[accepted] > before.get(accepted, 0.0) + 20
    bad = {**body, "prediction": BAD[0]}
    assert full_server.http.post("/v1/chat/completions/render", json=bad).status_code == 400
