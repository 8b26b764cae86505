"""The same text over HTTP from a plain server and from one with draft trees."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from tests.engine.beam import server_off
from tests.engine.chats import CHATS, chat, complete, joined
from tests.engine.prompts import texts
from tests.engine.serving import Server, running
from tests.processes import UNLISTED

pytestmark = pytest.mark.slow

PARSER = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
PLAIN = "plain"
NODES = 16
DRAFTED = "ngram_trie"
"""The server with drafts; its processes are those that vLLM starts by default, and its release of
vLLM is none that the ledger lists."""
COMMANDS = {
    PLAIN: [*server_off.OPTIONS, *PARSER],
    DRAFTED: [
        *PARSER,
        *("--speculative-model", "ngram_trie"),
        *("--speculative-config", '{"num_speculative_tokens": 16, "max_context_len": 10}'),
    ],
}
"""Options of each server, which has the name of its method; `test_configuration.py` has the other
spellings."""
VARIABLES = {"VLLM_TRIE_BEAM": "1", "VLLM_TRIE_CACHE_DIR": "/tmp", "VLLM_TRIE_NOT_OURS": "1"}
"""Of the servers; the last one is misspelled."""

STOPPED_TOKENS = 100
NUM_STOPPED = len(texts()[::4]) + 3
"""Requests with stop strings, of at most ``STOPPED_TOKENS`` each."""

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("count_words", "sort_lines")
]
CALLS = [
    r'<tool_call>\n\{"name": "count_words", "arguments": \{"lines": \["[a-z ]{9,30}"\]\}\}\n'
    r"</tool_call>",
    r'I count [a-z ]{4,20} <tool>\n<tool_call>\n\{"name": "sort_lines", "arguments": '
    r'\{"lines": \[\["[a-z]{1,9}"\], \{"top": [1-9]\}\]\}\}\n</tool_call>\n<tool_call>\n'
    r'\{"name": "count_words", "arguments": \{\}\}\n</tool_call>',
]
"""What the model may say, as it does not call tools by itself."""


@dataclass
class Answers:
    """The replies of a server, its metrics and its log."""

    replies: dict[str, Any] = field(default_factory=dict)
    bad_replies: dict[str, int | str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    nodes_of_opted_out: float = 0.0
    beams: dict[str, httpx.Response] = field(default_factory=dict)
    log: str = ""
    survived: bool = False


def ends(response: Any) -> list[tuple[str, str, Any]]:
    """Text, reason to end and stop string of each choice."""
    return [(c.text, c.finish_reason, c.stop_reason) for c in response.choices]


def ask(client: openai.OpenAI) -> dict[str, Any]:
    """Return the replies to requests of all kinds."""
    some = list(texts()[::4])
    replies: dict[str, Any] = {}
    replies["completions"] = ends(complete(client, some))
    with ThreadPoolExecutor(8) as pool:
        replies["at once"] = list(pool.map(lambda text: ends(complete(client, text)), some))
    replies["streamed"] = [
        joined(complete(client, text, stream=True), lambda c: c.text)[:2] for text in some[:3]
    ]
    replies["stop strings"] = ends(
        complete(client, some, max_tokens=STOPPED_TOKENS, stop=["):", "return"])
    )
    replies["stop strings kept"] = ends(
        complete(client, some[:3], stop=["):"], extra_body={"include_stop_str_in_output": True})
    )
    with_logprobs = complete(client, some[:3], logprobs=2).choices
    replies["tokens"] = [choice.logprobs.tokens for choice in with_logprobs]
    replies["logprobs"] = [choice.logprobs.token_logprobs for choice in with_logprobs]
    replies["seeded"] = ends(complete(client, some[:3], temperature=0.8, top_p=0.9, seed=5))
    replies["penalties"] = ends(
        complete(client, some[:3], presence_penalty=0.5, frequency_penalty=0.3)
    )
    answers = [chat(client, messages).choices[0] for messages in CHATS]
    replies["chat"] = [(a.message.content, a.finish_reason) for a in answers]
    replies["chat streamed"] = [
        joined(chat(client, messages, stream=True), lambda c: c.delta.content)[:2]
        for messages in CHATS
    ]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    replies["tool calls"] = [call_tools(client, said) for said in CALLS]
    streamed = [call_tools(client, said, **usage) for said in CALLS]
    replies["tool calls streamed"] = [reply[:-1] for reply in streamed]
    replies["tool call chunks"] = [reply[-1] for reply in streamed]
    (answer,) = chat(client, CHATS[0], logprobs=True, top_logprobs=2).choices
    replies["chat tokens"] = [entry.token for entry in answer.logprobs.content]
    replies["chat logprobs"] = [
        [top.logprob for top in entry.top_logprobs] for entry in answer.logprobs.content
    ]
    return replies


def call_tools(client: openai.OpenAI, said: str, **options: Any) -> tuple[Any, ...]:
    """What a client hears of a chat with tools: text, calls, reason to end, tokens; chunks last."""
    body = {"structured_outputs": {"regex": said}}
    with_tools = {"tools": TOOLS, "max_tokens": 200, "extra_body": body, **options}
    if not options:
        answer = chat(client, CHATS[0], **with_tools)
        message = answer.choices[0].message
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
        return message.content, calls, answer.choices[0].finish_reason
    text, calls, reason = "", [], None
    chunks = list(chat(client, CHATS[0], **with_tools))
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    calls.append(["", ""])
                calls[call.index][0] += call.function.name or ""
                calls[call.index][1] += call.function.arguments or ""
    return text, calls, reason, chunks[-1].usage.completion_tokens, len(chunks)


BAD = {
    "wrong type": {"extra_body": {"vllm_xargs": {"speculation": "nonsense"}}},
    "list": {"extra_body": {"vllm_xargs": {"speculation": [1, 2]}}},
    "unknown key": {"extra_body": {"vllm_xargs": {"no_such_option": 1}}},
    "no mapping": {"extra_body": {"vllm_xargs": 5}},
    "too long": {"prompt": "x " * 5000},
    "negative": {"max_tokens": -1},
}


def ask_badly(client: openai.OpenAI) -> dict[str, int | str]:
    """Return the status of each bad request, or its text if the server accepted it."""
    replies: dict[str, int | str] = {}
    for name, options in BAD.items():
        try:
            replies[name] = complete(client, **{"prompt": texts()[0], **options}).choices[0].text
        except openai.APIStatusError as error:
            replies[name] = error.status_code
    return replies


def interview(server: Server) -> Answers:
    answers = Answers()
    client = server.client()
    answers.replies = ask(client)
    answers.bad_replies = ask_badly(client)
    answers.replies["after bad requests"] = ends(complete(client, texts()[1]))
    before = server.metrics().get("vllm:trie_draft_nodes_total", 0.0)
    quiet = complete(client, texts()[1], extra_body={"vllm_xargs": {"speculation": False}})
    answers.replies["opted out"] = ends(quiet)
    answers.metrics = server.metrics()
    answers.nodes_of_opted_out = answers.metrics.get("vllm:trie_draft_nodes_total", 0.0) - before
    deadline = time.monotonic() + 20 * ("vllm:trie_steps_total" in answers.metrics)
    while "tokens per step" not in server.log_text() and time.monotonic() < deadline:
        complete(client, texts()[2], max_tokens=30)
        time.sleep(0.5)
    answers.log = server.log_text()
    answers.survived = server.is_healthy()
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The answers of each server; one runs at a time, for their memory."""
    folder, answers_of = tmp_path_factory.mktemp("servers"), {}
    for name, options in COMMANDS.items():
        drafts = name == DRAFTED
        processes = {"worker_process": drafts, "spawns": drafts}
        unlisted = {"PYTHONPATH": str(UNLISTED)} if drafts else {}
        with running(folder / name, *options, **processes, **VARIABLES, **unlisted) as server:
            answers_of[name] = interview(server)
            if name == PLAIN:
                answers_of[name].beams = server_off.ask_for_beams(server)
    return answers_of


def test_same_replies(answers):
    expected, replies = answers[PLAIN].replies, answers[DRAFTED].replies
    assert replies.keys() == expected.keys()
    for kind in expected:
        if "logprobs" not in kind and "chunks" not in kind:
            assert replies[kind] == expected[kind], kind


@pytest.mark.parametrize("kind", ["logprobs", "chat logprobs"])
def test_same_logprobs(answers, kind):
    for expected, logprobs in zip(
        answers[PLAIN].replies[kind], answers[DRAFTED].replies[kind], strict=True
    ):
        assert logprobs == pytest.approx(expected, abs=1e-3)


def test_the_requests_cover_what_they_should(answers):
    """Long texts, some that end at a stop string, some at the length limit."""
    replies = answers[PLAIN].replies
    assert replies["completions"] == [answer for (answer,) in replies["at once"]]
    assert [text for text, *_ in replies["streamed"]] == [
        text for text, *_ in replies["completions"][:3]
    ]
    assert replies["chat"] == replies["chat streamed"]
    reasons = {(reason, stop) for _, reason, stop in replies["stop strings"]}
    assert {stop for reason, stop in reasons if reason == "stop"} & {"):", "return"}
    assert len({text for text, *_ in replies["completions"]}) > 5
    assert replies["seeded"] != replies["completions"][:3]
    assert replies["penalties"] != replies["completions"][:3]


def test_streams_that_a_parser_reads_come_token_by_token(answers):
    plain, drafted = (answers[name].replies for name in (PLAIN, DRAFTED))
    for reply, streamed in zip(plain["tool calls"], plain["tool calls streamed"], strict=True):
        assert reply[2] == "tool_calls"
        assert streamed[:3] == (reply[0] or "", *reply[1:])
    # vLLM merges messages where a client reads more slowly than the engine sends.
    for chunks, expected in zip(
        drafted["tool call chunks"], plain["tool call chunks"], strict=True
    ):
        assert chunks >= expected > 10


def test_metrics_endpoint(answers):
    metrics = answers[DRAFTED].metrics
    nodes = metrics["vllm:trie_draft_nodes_total"]
    accepted = metrics["vllm:trie_accepted_tokens_total"]
    assert nodes == metrics["vllm:spec_decode_num_draft_tokens_total"] > 100
    assert accepted == metrics["vllm:spec_decode_num_accepted_tokens_total"] > 100
    assert metrics["vllm:trie_verified_trees_total"] == metrics["vllm:spec_decode_num_drafts_total"]
    assert nodes <= NODES * metrics["vllm:trie_verified_trees_total"]
    tokens, steps = metrics["vllm:trie_tokens_total"], metrics["vllm:trie_steps_total"]
    assert tokens / steps > 1.1
    # The next report counts the tokens of the last steps without drafts. Tokens after a stop string
    # are generated and discarded, until the front end's word that it was found arrives.
    generated = metrics["vllm:generation_tokens_total"]
    assert 0.9 * generated <= tokens <= generated + STOPPED_TOKENS * NUM_STOPPED
    for part in ("drafting", "verification", "overhead"):
        assert metrics[f"vllm:trie_{part}_seconds_total"] > 0
    assert metrics["vllm:trie_draft_failures_total"] == 0


def test_plain_server_has_no_counters_of_ours(answers):
    assert not [name for name in answers[PLAIN].metrics if "trie" in name]
    assert not [name for name in answers[PLAIN].metrics if "spec_decode" in name]


def test_beam_search_is_vllms_own_where_the_native_one_is_off(answers):
    server_off.check_beam_replies(answers[PLAIN].beams)


def test_a_front_end_warns_of_nothing_that_the_plugin_answers_for(answers):
    lines = answers[DRAFTED].log.splitlines()
    log = "\n".join(line for line in lines if line.startswith("(APIServer "))
    unknown = re.findall(r"Unknown vLLM environment variable detected: (VLLM_TRIE_\w+)", log)
    assert set(unknown) == {"VLLM_TRIE_NOT_OURS"}
    assert "experimental" not in log
    assert "max_num_scheduled_tokens" not in log
    assert "Async scheduling not supported" not in log
    assert log.count("vllm-trie is on: ngram_trie drafts up to 16 tokens") == 1
    assert "on Model Runner V1 without asynchronous scheduling" in log


def test_an_unlisted_release_is_checked_before_it_serves(answers):
    """In a process that is spawned, which has loaded no plugin when it begins to make the
    engine."""
    checks, _, served = answers[DRAFTED].log.partition("Application startup complete")
    assert served
    assert checks.count("Its hooks fit, and drafts passed their check") == 1
    assert checks.count("Native beam search passed its check") == 1


def test_line_in_the_log(answers):
    lines = [line for line in answers[DRAFTED].log.splitlines() if f"vllm-trie {DRAFTED}: " in line]
    assert lines
    assert "tokens per step" in lines[0]
    assert "failed drafts: 0" in lines[-1]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_bad_requests_harm_nobody(answers, name):
    replies = answers[name].bad_replies
    assert answers[name].survived
    assert "Traceback" not in answers[name].log
    assert replies == answers[PLAIN].bad_replies
    for kind in BAD.keys() - {"unknown key"}:
        assert replies[kind] in (400, 422), kind


def test_a_request_can_do_without_drafts(answers):
    assert answers[DRAFTED].nodes_of_opted_out == 0
    assert answers[DRAFTED].replies["opted out"] == answers[DRAFTED].replies["after bad requests"]
