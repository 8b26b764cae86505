"""Whatever a drafter does costs drafts at most."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.unit.drafters.support import VOCAB, make_context, make_request
from vllm_trie.drafts import Drafter, DrafterOptions, DraftRequest
from vllm_trie.drafts.engine.draft_requests import (
    _cache_salt,
    _sample_of,
    constant_fields,
    draft_request,
    ended_request,
)
from vllm_trie.drafts.engine.guard import FIRST_PAUSE_S, LONGEST_PAUSE_S, GuardedDrafter
from vllm_trie.hooks.wire import CACHE_SALT
from vllm_trie.tree import TokenTree

GOOD = TokenTree.from_lists([5, 6, 7], [-1, 0, -1])
LOGGER = logging.getLogger("tests.drafting")

Behaviour = Callable[[DraftRequest], Any]


class ScriptedDrafter(Drafter):
    """Does for each request what the test says, and remembers whom it was asked for."""

    name = "scripted"
    Options = DrafterOptions

    def __init__(self, behaviours: dict[str, Behaviour]) -> None:
        super().__init__(DrafterOptions(), make_context())
        self.behaviours = behaviours
        self.asked: list[list[str]] = []
        self.ended: dict[str, list[int]] = {}
        self.at_end: Behaviour = str

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self.asked.append([r.request_id for r in requests])
        return [self.behaviours.get(r.request_id, lambda _: GOOD)(r) for r in requests]

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        self.ended[request.request_id] = output.tolist()
        self.at_end(request)


def guard(drafter: Drafter, time_limit_s: float = 30.0) -> GuardedDrafter:
    return GuardedDrafter(drafter, VOCAB, time_limit_s, LOGGER)


def requests(ids: str, **more: Any) -> list[DraftRequest]:
    return [make_request([1, 2, 3], request_id, **more) for request_id in ids]


def sizes(trees: Sequence[TokenTree]) -> list[int]:
    return [tree.num_nodes for tree in trees]


def fail(request: DraftRequest) -> TokenTree:
    raise RuntimeError(f"a bug with {request.request_id}")


@pytest.fixture
def clock(monkeypatch):
    """The seconds of a clock that tests advance."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


MALFORMED: dict[str, Callable[[], Any]] = {
    "no tree": lambda: None,
    "a list": lambda: [5, 6, 7],
    "no arrays": lambda: TokenTree(None, None),
    "lists for arrays": lambda: TokenTree([1], [-1]),
    "child before its parent": lambda: TokenTree.from_lists([5, 6], [1, -1]),
    "too many nodes": lambda: TokenTree.from_lists(range(33), range(-1, 32)),
    "two dimensions": lambda: TokenTree(
        np.array([[1, 2]], dtype=np.int32), np.array([[-1, 0]], dtype=np.int32)
    ),
}
"""For more see the tests of :meth:`TokenTree.validate`, which the guard calls."""


@pytest.mark.parametrize("kind", ["error", *MALFORMED])
def test_a_request_that_fails_is_given_up_until_it_ends_and_the_others_are_not(kind):
    drafter = ScriptedDrafter({"b": fail if kind == "error" else lambda _: MALFORMED[kind]()})
    guarded = guard(drafter)
    assert sizes(guarded.propose(requests("abc"))) == [3, 0, 3]
    reason = "error" if kind == "error" else "malformed"
    assert guarded.failures == dict.fromkeys(guarded.failures, 0) | {reason: 1}
    drafter.asked.clear()
    assert sizes(guarded.propose(requests("cba"))) == [3, 0, 3]
    assert drafter.asked == [["c", "a"]]
    assert guarded.failures[reason] == 1
    guarded.release("b", make_request([1, 2, 3, 4], "b", num_prompt_tokens=3))
    assert drafter.ended == {"b": [4]}, "what it said is worth no less"
    drafter.behaviours.clear()
    assert sizes(guarded.propose(requests("b"))) == [3]


@pytest.mark.parametrize("answer", [None, [], [GOOD], [GOOD] * 3, 5])
def test_an_answer_of_the_wrong_shape(answer):
    drafter = ScriptedDrafter({})
    drafter.propose = lambda requests: answer
    guarded = guard(drafter)
    tree_sizes = sizes(guarded.propose(requests("ab")))
    # One tree is an answer for one request, so each may be served alone.
    assert tree_sizes == ([3, 3] if answer == [GOOD] else [0, 0])
    assert sum(guarded.failures.values()) == (0 if answer == [GOOD] else 2)


def test_drafts_end_before_placeholders_outside_the_vocabulary():
    """Of images, in the text of models that have them there; nobody else may draft such tokens."""
    chain = TokenTree.from_lists([5, VOCAB + 3, 6], [-1, 0, 1])
    guarded = guard(ScriptedDrafter({"a": lambda _: chain, "b": lambda _: chain}))
    with_image, without = make_request([1, VOCAB + 3, 5], "a"), make_request([1, 5], "b")
    trees = guarded.propose([with_image, without])
    assert [tree.token_ids.tolist() for tree in trees] == [[5], []]
    assert guarded.failures["malformed"] == 1
    assert sizes(guarded.propose([with_image, without])) == [1, 0]


def test_a_chain_where_a_chain_is_asked_for():
    guarded = guard(ScriptedDrafter({}))
    (tree,) = guarded.propose(requests("a", chain_only=True))
    assert tree.token_ids.tolist() == [5, 6]
    assert tree.is_chain


LIMIT_S = 0.5


@pytest.mark.parametrize("raises", [False, True])
def test_a_drafter_that_takes_too_long_rests_longer_each_time(clock, plugin_log, raises):
    def dawdle(request: DraftRequest) -> TokenTree:
        clock.now += 2 * LIMIT_S
        return fail(request) if raises else GOOD

    drafter = ScriptedDrafter({"b": dawdle})
    guarded = guard(drafter, LIMIT_S)
    pauses = [FIRST_PAUSE_S * 2**n for n in range(6)]
    for number, pause in enumerate([*pauses, LONGEST_PAUSE_S, LONGEST_PAUSE_S], 1):
        assert sizes(guarded.propose(requests("abc"))) == [0, 0, 0]
        assert guarded.failures == dict.fromkeys(guarded.failures, 0) | {"timeout": number}
        clock.now += pause - 1
        assert sizes(guarded.propose(requests("ac"))) == [0, 0]
        assert drafter.asked == [["a", "b", "c"]] * number
        clock.now += 2
    clock.now += 10 * LONGEST_PAUSE_S
    guarded.propose(requests("abc"))
    said = [record.getMessage() for record in plugin_log.records]
    assert len(said) == 9, "each pause is said"
    for message in (said[0], said[-1]):  # one that comes long after the others is the first again
        assert f"longer than draft_timeout_s={LIMIT_S}; drafting rests for 60 s" in message


def test_requests_that_end_in_a_pause_are_told_after_it_without_their_text(clock):
    def dawdle(request: DraftRequest) -> TokenTree:
        clock.now += 2 * LIMIT_S
        return GOOD

    drafter = ScriptedDrafter({"b": dawdle})
    guarded = guard(drafter, LIMIT_S)
    drafter.at_end = lambda request: arguments.append(request.extra_args)
    arguments: list[Any] = []
    guarded.read_prompts(requests("d"))
    guarded.prepare(requests("e"), [0], 1)
    guarded.propose(requests("b"))
    for name in "bdef":
        request = make_request([1, 2, 3, 4], name, 3, extra_args={"prediction": [1] * 1000})
        guarded.release(name, request)
    guarded.release("never drafted", None)
    assert drafter.ended == {}
    clock.now += FIRST_PAUSE_S
    assert sizes(guarded.propose(requests("ac"))) == [GOOD.num_nodes] * 2
    assert drafter.ended == {"b": [], "d": [], "e": []}, "the drafter has never seen f"
    assert arguments == [{}] * 3, "texts would pile up"


def test_nobody_waits_twice_when_the_culprit_is_looked_for(clock):
    """A batch that fails is tried request by request; the first that takes too long ends that."""

    def dawdle(request: DraftRequest) -> TokenTree:
        if len(drafter.asked[-1]) > 1:
            return fail(request)
        clock.now += 2 * LIMIT_S
        return GOOD

    drafter = ScriptedDrafter(dict.fromkeys("abc", dawdle))
    guarded = guard(drafter, LIMIT_S)
    assert sizes(guarded.propose(requests("abc"))) == [0, 0, 0]
    assert guarded.failures["timeout"] == 1
    assert drafter.asked == [["a", "b", "c"], ["a"]]


def test_after_a_reset_no_earlier_text_is_learned():
    drafter = ScriptedDrafter({})
    guarded = guard(drafter)
    guarded.reset(["a"])  # it may have ended: the scheduler tells with the next step
    for learned in ([], [4]):
        guarded.release("a", make_request([1, 2, 3, 4], "a", num_prompt_tokens=3))
        assert drafter.ended.pop("a") == learned


@pytest.mark.parametrize(("seconds", "reason"), [(0.0, "error"), (2 * LIMIT_S, "timeout")])
def test_the_end_of_a_request_may_fail_or_take_too_long(clock, seconds, reason):
    def end(request: DraftRequest) -> None:
        clock.now += seconds
        fail(request)

    drafter = ScriptedDrafter({})
    drafter.at_end = end
    guarded = guard(drafter, LIMIT_S)
    guarded.release("a", *requests("a"))
    assert guarded.failures[reason] == sum(guarded.failures.values()) == 1
    guarded.release("b", *requests("b"))
    assert [*drafter.ended] == (["a", "b"] if reason == "error" else ["a"])
    assert sizes(guarded.propose(requests("c"))) == [3 * (reason == "error")]


def test_a_drafter_may_use_its_arrays_again():
    drafted = TokenTree.from_lists([5, 6, 7], [-1, 0, 0])
    (tree,) = guard(ScriptedDrafter({"a": lambda _: drafted})).propose(requests("a"))
    drafted.token_ids[:] = 0
    drafted.parents[:] = -1
    assert tree.token_ids.tolist() == tree.token_list == [5, 6, 7]
    assert tree.parents.tolist() == tree.parent_list == [-1, 0, 0]


def test_only_the_first_failure_is_logged_and_with_its_traceback(caplog):
    guarded = guard(ScriptedDrafter({"a": fail, "b": lambda _: None}))
    with caplog.at_level(logging.INFO, logger=LOGGER.name):
        guarded.propose(requests("abc"))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    message = record.getMessage()
    assert "'scripted'" in message
    assert "request a" in message
    assert "vllm:trie_draft_failures_total" in message
    assert "a bug with a" in str(record.exc_info[1])


def test_an_interrupt_by_the_user_is_not_swallowed():
    def interrupt(request: DraftRequest) -> TokenTree:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard(ScriptedDrafter({"a": interrupt})).propose(requests("a"))


def test_adapters_and_salts_never_collide():
    def salt(adapter: str | None, cache_salt: str | None) -> str | None:
        lora = None if adapter is None else SimpleNamespace(lora_name=adapter)
        extra_args = {} if cache_salt is None else {CACHE_SALT: cache_salt}
        return _cache_salt(SimpleNamespace(lora_request=lora), extra_args)

    names, salts = ("sql", "sql\0", "", "\x003:sql"), (None, "s", "sql\0", "\x003:sql", "\0:s")
    keys = [salt(adapter, given) for adapter in (None, *names) for given in salts]
    assert len(set(keys)) == len(keys)


def test_samples_are_known_by_their_ids():
    assert _sample_of("12_chat-1") == _sample_of("0_chat-1") == "chat-1"
    assert [_sample_of(name) for name in ("chat_1", "7", "_x", "7_")] == [None] * 4


@pytest.mark.parametrize(
    ("params", "is_chain"),
    [
        ({}, False),
        ({"thinking_token_budget": 3}, True),
        ({"structured_outputs": StructuredOutputsParams(regex="a*")}, True),
    ],
)
def test_what_vllm_checks_along_a_chain_is_a_chain(params, is_chain):
    data = SimpleNamespace(sampling_params=SamplingParams(**params), lora_request=None)
    text = np.array([7, 2, 12], dtype=np.int32)
    fields = constant_fields("a", data, 2)
    request = draft_request(fields, data.sampling_params, text, 1, 100, 8, False)
    assert request.chain_only == is_chain


@pytest.mark.parametrize(
    ("params", "num_kept"),
    [
        ({}, 2),
        ({"ignore_eos": True, "temperature": 0.0}, 3),
        ({"ignore_eos": True, "stop_token_ids": [12]}, 1),
    ],
)
def test_nothing_is_learned_from_tokens_behind_the_end(params, num_kept):
    """Model Runner V1 keeps what the last step has computed there."""
    sampling_params = SamplingParams(**params)
    sampling_params.update_from_generation_config({}, 2)
    data = SimpleNamespace(sampling_params=sampling_params, lora_request=None)
    text = np.array([7, 2, 12, 2, 13], dtype=np.int32)
    ended = ended_request(constant_fields("a", data, 2), sampling_params, text)
    assert ended.token_ids.tolist() == [7, 2, *[12, 2, 13][:num_kept]]
    assert ended.is_sampled == ("temperature" not in params)
