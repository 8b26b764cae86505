"""Two engines behind two API servers: trees and beam search give the output of one engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm import SamplingParams

from tests.engine.beam.cases import prompt
from tests.engine.beam.oracle import Case, search
from tests.engine.chats import complete
from tests.engine.compare import generate
from tests.engine.prompts import texts, tokenizer
from tests.engine.serving import Server, running
from vllm_trie.lab.tiny_model import model_path

pytestmark = pytest.mark.slow

COMMAND = [
    *("--data-parallel-size", "2", "--api-server-count", "2"),
    "--enable-log-requests",
    *("--spec-method", "ngram_trie", "--spec-tokens", "16"),
]
TEXTS = list(texts()[::4])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    # vLLM sets this for its processes, and forked ones have read it already.
    with running(folder / "log", *COMMAND, PROMETHEUS_MULTIPROC_DIR=str(folder)) as server:
        yield server


def answers(server: Server, text: str | list[int], **options: Any) -> list[str]:
    return [choice.text for choice in complete(server.client(), text, **options).choices]


def test_speculation(engine, server):
    prompts = [{"prompt_token_ids": tokenizer().encode(text)} for text in TEXTS]
    plain = generate(engine(), prompts, SamplingParams(temperature=0.0, max_tokens=60))
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda text: answers(server, text), TEXTS))
    assert texts == [[output.outputs[0].text] for output in plain]

    accepted: dict[str, float] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "vllm:trie_accepted_tokens_total":
                accepted[sample.labels["engine"]] = sample.value
    assert sorted(accepted) == ["0", "1"]
    assert min(accepted.values()) > 20


def test_beam_search(server):
    cases = [Case(prompt(number, 40), 3) for number in range(4)]

    def ask(case: Case) -> list[str]:
        options = {"extra_body": {"use_beam_search": True}, "n": 3, "max_tokens": case.max_tokens}
        return answers(server, list(case.prompt_token_ids), **options)

    with ThreadPoolExecutor(4) as pool:
        per_case = list(pool.map(ask, cases))
    for case, hypotheses in zip(cases, per_case, strict=True):
        expected = [hypothesis.token_ids for hypothesis in search(str(model_path()), case)]
        assert hypotheses == tokenizer().batch_decode(expected, skip_special_tokens=True)
