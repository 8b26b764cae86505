"""Options that requests bring along: what is refused, and as whose fault."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError

from vllm_trie.hooks.frontend.request_options import with_packed_options
from vllm_trie.hooks.start.additional_config import CONFIG_KEY
from vllm_trie.hooks.start.limits import reason_off
from vllm_trie.hooks.wire import CACHE_SALT, SEARCH_KEY
from vllm_trie.searches import BeamOptions, parse_options
from vllm_trie.searches.engine.frontend import extension, requests
from vllm_trie.searches.engine.frontend.extra_args import check_extra_args
from vllm_trie.searches.engine.frontend.hypotheses import ServerCall, served
from vllm_trie.searches.engine.frontend.requests import check_api_request, prepare_request

ENGINE: Any = SimpleNamespace(kv_transfer_config=None)


def check_options(engine: Any, params: Any) -> None:
    assert with_packed_options(engine, params, None) is params


@pytest.mark.parametrize("value", ["nonsense", 5, [1, 2], None, 0.5])
def test_nonsense_is_the_clients_error(value):
    """The server answers 400 to a ``VLLMClientError`` and 500 to any other exception."""
    with pytest.raises(VLLMClientError, match=r"extra_args\['speculation'\]") as error:
        check_options(ENGINE, SimpleNamespace(extra_args={"speculation": value}))
    assert isinstance(error.value, ValueError)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("extra_args", [None, {}, {"speculation": True}, {"speculation": 0}])
def test_what_makes_sense_passes(extra_args):
    check_options(ENGINE, SimpleNamespace(extra_args=extra_args))


@pytest.mark.parametrize("value", ["tenant", 5, [1, 2]])
@pytest.mark.parametrize(
    ("key", "check", "instead"),
    [
        (CACHE_SALT, check_options, "cache_salt"),
        (SEARCH_KEY, lambda engine, params: check_extra_args(engine, params, []), "beam_width"),
    ],
)
def test_what_the_plugin_tells_itself_is_not_for_requests(key, check, instead, value):
    """It is believed without checks where it arrives: in the worker, and in the scheduler."""
    params = SimpleNamespace(extra_args={key: value})
    with pytest.raises(VLLMClientError, match=key) as error:
        check(ENGINE, params)
    assert f" {instead}" in str(error.value).replace("'", "")
    check(ENGINE, SimpleNamespace(extra_args={"something": value}))
    check(ENGINE, SimpleNamespace(extra_args=None))


def check(extra_args: dict[str, Any] | None, *processors: str, connector: Any = None) -> None:
    config: Any = SimpleNamespace(kv_transfer_config=connector)
    check_extra_args(config, SimpleNamespace(extra_args=extra_args), list(processors))


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"num_beam_groups": 2}, r"num_beam_groups=2 needs 'beam_width'; add it, or leave"),
        ({"length_penalty": 1e9}, "length_penalty=1000000000.0 needs 'beam_width'"),
        ({"beam_trace": True, "speculation": False}, "beam_trace=True needs"),
        ({"beam_widht": 4}, "'beam_widht'] is unknown; did you mean 'beam_width'"),
        ({"num_beams": 4}, "'num_beams' is unknown; use 'beam_width'"),
        ({"speculaton": False}, "'speculaton'] is unknown; did you mean 'speculation'"),
    ],
)
def test_options_that_would_be_ignored_are_refused(extra_args, message):
    with pytest.raises(VLLMClientError, match=message):
        check(extra_args)
    check(extra_args, "package:Processor")  # it may read the key


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        (
            {f"beam_widt{i}": 1 for i in range(100_000)},
            "has 10000[01] keys, at most 64 are allowed",
        ),
        ({"k" * 300_000: 1}, "size of 3000.. up to the key 'kkk.*at most 262144"),
        ({"a": "x" * 200_000, "b": "x" * 200_000}, "size of 4000.. up to the key 'b'"),
        ({"speculation": ["x"] * 300_000}, "at most 262144"),
    ],
)
@pytest.mark.parametrize("leader", [{}, {"beam_width": 4}])
def test_the_work_for_a_request_is_bounded(extra_args, message, leader):
    """Misspelling help takes 50 us for a key: plain work for as many keys as a client likes."""
    begin = time.process_time()
    with pytest.raises(VLLMClientError, match=message) as error:
        check({**leader, **extra_args})
    assert time.process_time() - begin < 0.5
    assert len(str(error.value)) < 1000
    if len(extra_args) > 100:
        check({**leader, **extra_args}, "package:Processor")  # it may read the keys


@pytest.mark.parametrize(
    "value",
    [["x"] * 100_000, "x" * 10**6, "9" * 10**6, [0.5] * 100_000],
    ids=["strings", "string", "digits", "numbers"],
)
@pytest.mark.parametrize("name", BeamOptions.model_fields)
def test_a_large_wrong_value_is_refused_at_once(name, value):
    begin = time.process_time()
    with pytest.raises(ValueError, match=name) as error:
        parse_options(BeamOptions, {"beam_width": 4, name: value})
    assert time.process_time() - begin < 0.2
    assert len(str(error.value)) < 1000


def test_a_large_misplaced_value_is_refused_at_once():
    """Fields outside of ``vllm_xargs`` are any JSON."""
    numbers = [*range(200_000)]
    random.Random(1).shuffle(numbers)
    nested: Any = dict.fromkeys(numbers)
    for _ in range(5):
        nested = [nested] * 20
    begin = time.process_time()
    for value in (dict.fromkeys(numbers), nested):
        with pytest.raises(VLLMClientError, match="no field of a request") as error:
            check_api_request(SimpleNamespace(model_extra={"beam_width": value}))
        assert len(str(error.value)) < 500
    assert time.process_time() - begin < 0.2


@pytest.mark.parametrize(
    ("fields", "misplaced"),
    [
        ({"speculation": False}, "speculation=False"),
        ({"beam_width": 4}, "beam_width=4"),
        ({"vllm_xargs": {"beam_width": 4}, "early_stopping": "never"}, "early_stopping='never'"),
        ({"use_beam_search": True, "no_repeat_ngram_size": 2}, "no_repeat_ngram_size=2"),
        ({"do_sample": True, "length_penalty": 2.0, "stream": True}, None),
        ({"use_beam_search": True, "length_penalty": 2.0}, None),
    ],
)
def test_options_outside_of_vllm_xargs_are_refused(fields, misplaced):
    """vLLM drops fields that it does not know; only those of other servers pass."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest(model="m", prompt="x", **fields)
    if misplaced is None:
        return check_api_request(request)
    with pytest.raises(VLLMClientError, match=f"{misplaced} is no field .* 'vllm_xargs'"):
        check_api_request(request)


LARGE = {
    "text": "x" * 10_000_000,
    "texts": ["x" * 1000] * 1000,
    "numbers": list(range(300_000)),
    "nested": {"deep": [{"x" * 270_000: 1}]},
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_values_that_nobody_reads_are_refused(kind):
    value = LARGE[kind]
    for key in ("unknown", "speculation", "beam_width"):
        with pytest.raises(VLLMClientError, match=rf"has a size of \d+ .*'{key}'") as error:
            check({key: value}, *["package:Processor"] * (key != "unknown"))
        assert len(str(error.value)) < 300
    check({"unknown": value}, "package:Processor")
    check({"unknown": value}, connector=object())
    check({"kv_transfer_params": value})


@pytest.mark.parametrize(
    "extra_args",
    [None, {}, {"unknown": "x" * 260_000}, {"beam_width": 4, "num_beam_groups": 2}],
)
def test_other_extra_arguments_pass(extra_args):
    check(extra_args)


GENERATION_CONFIG = {"repetition_penalty": 1.1, "min_p": 0.1, "frequency_penalty": -0.5}


def served_params(monkeypatch: pytest.MonkeyPatch, extra_args: Any, **fields: Any) -> Any:
    """What the engine gets of a chat, on a server with sampling parameters of its own."""
    monkeypatch.setattr(requests, "reason_off", lambda config: None)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=None),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_active_seqs=None),
        kv_transfer_config=None,
        additional_config={CONFIG_KEY: {"items": {"shop": "PATH"}}},
    )
    chat = ChatCompletionRequest(messages=[], model="m", vllm_xargs=extra_args, **fields)
    before = served.set(ServerCall(chat, []))
    try:
        return prepare_request(config, chat.to_sampling_params(8, GENERATION_CONFIG))
    finally:
        served.reset(before)


def test_defaults_of_the_server_act_where_a_search_can_have_them(monkeypatch):
    params = served_params(monkeypatch, {"beam_width": 2})
    assert params.repetition_penalty == 1.1
    assert (params.min_p, params.frequency_penalty) == (0.0, 0.0)


@pytest.mark.parametrize("name", GENERATION_CONFIG)
def test_what_a_client_sends_itself_is_refused(monkeypatch, name):
    refused = {"repetition_penalty": 0.5}.get(name, GENERATION_CONFIG[name])
    with pytest.raises(VLLMClientError, match=f"{name}={refused} is not supported with beam_width"):
        served_params(monkeypatch, {"beam_width": 2}, **{name: refused})


def test_a_search_is_off_if_one_of_several_engines_has_it_off(monkeypatch):
    """Whichever reports last: each of them may get any search."""
    client: Any = SimpleNamespace(vllm_config=SimpleNamespace())
    for reason in (None, "it failed its check", None):
        response = SimpleNamespace(beams_off=reason)
        monkeypatch.setattr(msgspec.msgpack, "decode", lambda *_, answer=response, **__: answer)
        extension.apply_ready_response(lambda *_: None, client, b"a report")
    assert reason_off(client.vllm_config) == "it failed its check"


@pytest.mark.parametrize(
    ("changes", "num_engines"),
    [
        ({}, 4),
        ({"local_engines_only": True}, 2),
        ({"local_engines_only": True, "data_parallel_rank_local": 1}, 1),
        ({"data_parallel_rank_local": 0}, 1),
    ],
)
def test_blocks_are_those_of_one_engine(changes, num_engines):
    parallel: Any = SimpleNamespace(
        data_parallel_size=4,
        data_parallel_size_local=2,
        local_engines_only=False,
        data_parallel_rank_local=None,
    )
    vars(parallel).update(changes)
    assert requests._num_engines(parallel) == num_engines
