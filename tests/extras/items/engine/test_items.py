"""Searches inside a catalogue: parity with Hugging Face, traffic, refusals, new versions.

A catalogue of a million items at width 400, which takes minutes:

    ITEMS_PARITY=1000000,400 python -m pytest tests/extras/items/engine/test_items.py -k hugging
"""

import functools
import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.beam.cases import prompt
from tests.engine.beam.oracle import constrained_search
from tests.extras.items.unit.catalogues import (
    PlainTrie,
    random_items,
    selected_items,
    weight_of,
    write,
)
from vllm_trie.extras.items.selection import Rules
from vllm_trie.files import watched_file
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.lab.tiny_model import model_path

SHIPPED = str(model_path())
EOS = 0
NUM_ITEMS, WIDTH = map(int, os.environ.get("ITEMS_PARITY", "10000,50").split(","))
EQUAL = random_items(1, NUM_ITEMS, 0, (4, 4), branching=200)
MIXED = random_items(2, NUM_ITEMS * 3 // 10, 0, (1, 5), branching=300)
FEW = {(5, 6): 1, (5, 6, 7): 2, (9,): 3}
OPTIONS = {"max_num_seqs": WIDTH + 14, "max_model_len": 256, "block_size": 32}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("catalogues")
    catalogues = {"equal": EQUAL, "mixed": MIXED, "few": FEW}
    return {
        name: str(write(folder / name, items, text_ids=name == "mixed", weights=name == "few"))
        for name, items in catalogues.items()
    }


@pytest.fixture
def items_engine(engine, paths):
    def start(**options):
        additional = {"vllm_trie": {"items": paths}}
        return engine(**{**OPTIONS, "additional_config": additional, **options})

    return start


def items_params(width, items, n=None, max_tokens=12, **options):
    from vllm import SamplingParams

    extra_args = {"beam_width": width, "items": items, **options}
    return SamplingParams(
        n=n or width, temperature=0.0, max_tokens=max_tokens, logprobs=0, extra_args=extra_args
    )


CASES = [
    # prompt, width, catalogue, items, items_end, early_stopping
    (prompt(1, 30), 4, "equal", EQUAL, "complete", False),
    (prompt(2, 40), WIDTH, "equal", EQUAL, "complete", False),
    (prompt(3, 33), 4, "mixed", MIXED, "eos", True),
    (prompt(4, 50), WIDTH, "mixed", MIXED, "eos", False),
    (prompt(5, 60), WIDTH, "mixed", MIXED, "eos", True),
    (prompt(6, 45), WIDTH, "mixed", MIXED, "complete", False),
]


@functools.cache
def expected_of(number):
    token_ids, width, _, items, items_end, early_stopping = CASES[number]
    eos = EOS if items_end == "eos" else None
    plain = PlainTrie(items)
    longest = max(map(len, items)) + (eos is not None)
    return constrained_search(
        SHIPPED, token_ids, width, longest, lambda path: plain.allowed(path, eos), eos,
        early_stopping,
    )  # fmt: skip


def check(number, result):
    _, width, _, items, items_end, _ = CASES[number]
    eos = EOS if items_end == "eos" else None
    if eos is not None or items is EQUAL:  # Hugging Face ends no item that others begin with
        outputs = [list(output.token_ids) for output in result.outputs]
        assert outputs == [hypothesis.token_ids for hypothesis in expected_of(number)]
        scores = [output.score for output in result.outputs]
        expected = [hypothesis.score for hypothesis in expected_of(number)]
        assert scores == pytest.approx(expected, abs=1e-4)
    assert len({output.item for output in result.outputs}) == width
    for output in result.outputs:
        tokens = tuple(output.token_ids if eos is None else output.token_ids[:-1])
        text_ids = items is MIXED
        assert output.item == (f"item {items[tokens]}" if text_ids else items[tokens])
        assert output.beam["item"] == output.item
        assert (output.finish_reason, output.stop_reason) == ("stop", output.item)
        assert sum(
            next(iter(logprobs.values())).logprob for logprobs in output.logprobs
        ) == pytest.approx(output.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"async_scheduling": True}, id="asynchronous"),
        pytest.param({"max_num_batched_tokens": WIDTH + 20}, id="chunked prefill"),
        pytest.param({"num_gpu_blocks_override": WIDTH + 4}, id="preemption"),
        pytest.param(
            {"max_num_batched_tokens": WIDTH + 20, "num_gpu_blocks_override": WIDTH + 4},
            id="chunked prefill and preemption",
        ),
        pytest.param(
            {"speculative_config": {"method": "ngram_trie", "num_speculative_tokens": 8}},
            id="beside drafts",
        ),
    ],
)
@pytest.mark.timeout(300 + NUM_ITEMS // 500)
def test_equals_hugging_face_in_a_batch(items_engine, options):
    from vllm import SamplingParams

    llm = items_engine(**options)
    ordinary = [{"prompt_token_ids": list(prompt(50 + i, 25 + i))} for i in range(6)]
    greedy = [SamplingParams(temperature=0.0, max_tokens=20, logprobs=4 * i) for i in range(6)]
    beams = SamplingParams(n=3, temperature=0.0, max_tokens=8, extra_args={"beam_width": 3})
    alone = llm.generate(ordinary, greedy[:-1] + [beams], use_tqdm=False)
    searched = [{"prompt_token_ids": list(case[0])} for case in CASES]
    searches = [
        items_params(width, name, items_end=items_end, early_stopping=early_stopping)
        for _, width, name, _, items_end, early_stopping in CASES
    ]
    results = llm.generate(searched + ordinary, searches + greedy[:-1] + [beams], use_tqdm=False)
    for number in range(len(CASES)):
        check(number, results[number])
    for before, after in zip(alone, results[len(CASES) :], strict=True):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            for ours, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert ours.keys() == theirs.keys()
    if "num_gpu_blocks_override" in options:
        assert scheduler_of(llm).beam_counters.beams_preempted


def test_fewer_items_than_the_width(items_engine):
    """Next to requests with more log-probabilities than the catalogue has nodes."""
    from vllm import SamplingParams

    llm = items_engine()
    params = [items_params(8, "few"), SamplingParams(max_tokens=9, logprobs=20)]
    prompts = [{"prompt_token_ids": list(prompt(i, 9))} for i in range(2)]
    result, _ = llm.generate(prompts, params, use_tqdm=False)
    items = [output.item for output in result.outputs if output.token_ids]
    assert sorted(items) == [1, 2, 3]
    assert [output.beam.get("item") for output in result.outputs[3:]] == [None] * 5


def test_allowed_and_denied_items(items_engine):
    """A search as wide as what the rules leave finds all of it; two requests have rules each."""
    beginnings = Counter(tokens[:2] for tokens in EQUAL)
    (first, _), (second, _), (third, _) = beginnings.most_common(3)
    some = [number for tokens, number in EQUAL.items() if tokens[:2] in (first, third)]
    equal = Rules([some[0], 10**9], [first, third, (1999,)], some[-1:], [(*second, 5)])
    mixed_ids = {tokens: f"item {number}" for tokens, number in MIXED.items()}
    prefix = next(tokens for tokens in MIXED if len(tokens) == 3)[:1]
    mixed = Rules(None, [prefix], [mixed_ids.get(prefix, "none")], [])
    allowed = [
        selected_items(EQUAL, EQUAL, equal).values(),
        [mixed_ids[tokens] for tokens in selected_items(MIXED, mixed_ids, mixed)],
        [],
    ]
    assert all(1 < len(item_ids) <= 16 for item_ids in allowed[:2]), list(map(len, allowed))
    llm = items_engine()
    params = [
        items_params(
            16, "equal", detokenize=0, **{k: v and list(v) for k, v in equal._asdict().items()}
        ),
        # As over HTTP, where lists of lists are text.
        items_params(16, "mixed", allow_prefixes=json.dumps([prefix]), deny_items=mixed.deny_items),
        items_params(3, "equal", allow_items=[]),
    ]
    prompts = [{"prompt_token_ids": list(prompt(i, 20))} for i in range(3)]
    for item_ids, result in zip(
        allowed, llm.generate(prompts, params, use_tqdm=False), strict=True
    ):
        items = [output.item for output in result.outputs if output.token_ids]
        assert any(output.text for output in result.outputs) == (item_ids is allowed[1])
        assert len(items) == len(set(items))
        assert set(items) == set(item_ids)


def test_weights_of_items(items_engine):
    llm = items_engine()
    results = llm.generate(
        [{"prompt_token_ids": list(prompt(1, 9))}] * 2,
        [items_params(3, "few", weight_factor=factor, length_penalty=0.0) for factor in (0, 10)],
        use_tqdm=False,
    )
    plain, weighted = ({o.item: o for o in result.outputs} for result in results)
    for item, output in weighted.items():
        added = 10 * weight_of(item)
        assert output.score == pytest.approx(plain[item].score + added, abs=1e-4)
        assert output.cumulative_logprob == pytest.approx(plain[item].cumulative_logprob, abs=1e-4)
    scores = [output.score for output in results[1].outputs]
    assert scores == sorted(scores, reverse=True)


def test_normalized_over_valid_tokens(items_engine):
    """Probabilities of all items sum to 1."""
    import math

    llm = items_engine()
    params = items_params(8, "few", items_end="eos", normalize="valid")
    (result,) = llm.generate([{"prompt_token_ids": list(prompt(1, 9))}], params, use_tqdm=False)
    total = sum(math.exp(o.cumulative_logprob) for o in result.outputs if o.token_ids)
    assert total == pytest.approx(1.0, abs=1e-4)


def test_metrics(items_engine):
    def values():
        return {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:trie_beam")}

    llm = items_engine()
    requests = [{"prompt_token_ids": list(prompt(i, 9))} for i in range(2)]
    before = values()
    results = llm.generate(
        requests, [items_params(8, "few", n=4), items_params(4, "equal")], use_tqdm=False
    )
    assert all("report" not in output.beam for result in results for output in result.outputs)
    increases = {name: value - before.get(name, 0) for name, value in values().items()}
    assert increases["vllm:trie_beam_searches"] == 2
    assert increases["vllm:trie_beam_hypotheses"] == 8 + 4
    assert increases["vllm:trie_beam_steps"] == 3 + 4


def test_beam_search_params(items_engine):
    from vllm.sampling_params import BeamSearchParams

    llm = items_engine()
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
    params.items = "equal"
    case = CASES[0]
    (output,) = llm.beam_search([{"prompt_token_ids": list(case[0])}], params)
    plain = PlainTrie(EQUAL)
    expected = constrained_search(
        SHIPPED, case[0], 4, 4, lambda path: plain.allowed(path, None), None
    )
    tokens = [sequence.tokens[len(case[0]) :] for sequence in output.sequences]
    assert tokens == [hypothesis.token_ids for hypothesis in expected]
    assert [sequence.item for sequence in output.sequences] == [
        EQUAL[tuple(hypothesis.token_ids)] for hypothesis in expected
    ]


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"items": "equal"}, "items='equal' needs 'beam_width'; add beam_width=1"),
        ({"items": "equal", "deny_items": [1]}, "items='equal' needs 'beam_width'"),
        ({"vllm_trie_beam": {}}, "is for vllm-trie's own use; leave it out, and ask with 'beam_w"),
    ],
)
def test_refused_requests_without_a_search(items_engine, extra_args, message):
    from vllm import SamplingParams

    params = SamplingParams(extra_args=extra_args, max_tokens=12)
    with pytest.raises(ValueError, match=message):
        items_engine().generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "sampling", "message"),
    [
        ({"items": "other"}, {}, "items='other' is no catalogue of this engine, which has 'equal'"),
        ({"items": 3}, {}, "items: Input should be a valid string, got 3"),
        ({"items": "equal", "do_sample": True}, {}, "items and do_sample exclude each other"),
        ({"items_end": "eos"}, {}, "items_end='eos' needs items"),
        ({"deny_items": [1]}, {}, r"deny_items=\[1\] needs items"),
        ({"items": "equal", "deny_items": ["a"]}, {}, "deny_items has 'a', the ids of 'equal' are"),
        (
            {"items": "equal", "deny_items": [*range(5000)]},
            {},
            "5000 entries, at most 4096",
        ),
        ({"items": "equal", "allow_items": [2**63]}, {}, "must be a list of integers of 64"),
        ({"items": "equal", "deny_items": "[" * 50_000}, {}, "deny_items: must be a list of"),
        ({"items": "equal", "deny_items": ["\ud800"]}, {}, "must be a list of integers"),
        ({"items": "equal", "deny_prefixes": "[[1"}, {}, "deny_prefixes: Input should be a valid"),
        ({"items": "equal", "deny_prefixes": [[]]}, {}, "deny_prefixes: List should have at least"),
        ({"items": "equal", "weight_factor": 1e9}, {}, "weight_factor: Input should be less than"),
        ({"items": "equal", "normalize": "all"}, {}, "normalize: Input should be"),
        ({"items": "equal"}, {"max_tokens": 3}, "max_tokens must be at least 4, the longest item"),
        (
            {"items": "equal", "items_end": "eos"},
            {"max_tokens": 4},
            "at least 5, .* and EOS",
        ),
        ({"items": "equal"}, {"stop": ["a"]}, r"stop=\['a'\] is not supported with items"),
        ({"items": "equal"}, {"min_tokens": 2}, "min_tokens=2 is not supported with items"),
        ({"items": "equal"}, {"logprobs": 2}, "logprobs=2 is not supported with items"),
        ({"items": "equal"}, {"repetition_penalty": 1.5}, "repetition_penalty=1.5 is not"),
        ({"items": "equal"}, {"logit_bias": {3: 1.0}}, "logit_bias={3: 1.0} is not"),
        ({"items": "equal"}, {"allowed_token_ids": [3]}, r"allowed_token_ids=\[3\] is not"),
    ],
)
def test_refused_requests(items_engine, options, sampling, message):
    from vllm import SamplingParams

    llm = items_engine()
    params = SamplingParams(
        extra_args={"beam_width": 4, **options},
        **{"temperature": 0.0, "max_tokens": 12, **sampling},
    )
    with pytest.raises(ValueError, match=message):
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)


@pytest.mark.parametrize("place", ["scheduler", "worker"])
def test_an_error_fails_its_request_alone(items_engine, monkeypatch, place):
    """Whatever a request brings about, at each of the places where its content is looked at."""
    from vllm import SamplingParams

    from vllm_trie.extras.items import catalogues, selection, worker

    def fail(*arguments, **options):
        raise OverflowError("nobody thought of this")

    llm = items_engine()
    llm_engine = llm.llm_engine
    if place == "scheduler":
        monkeypatch.setattr(catalogues, "select", fail)
    else:
        monkeypatch.setattr(worker, "view", fail)
    assert selection.select is not fail
    extra_args = {"items": "equal", "deny_items": [1], "beam_width": 4}
    greedy = SamplingParams(temperature=0.0, max_tokens=9)
    (alone,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy, use_tqdm=False)
    wrong = SamplingParams(temperature=0.0, max_tokens=9, extra_args=extra_args)
    finished = {}
    for name, params in (("wrong", wrong), ("neighbour", greedy)):
        llm_engine.add_request(name, {"prompt_token_ids": [1, 2, 3]}, params)
    while llm_engine.has_unfinished_requests():
        for result in llm_engine.step():
            finished[result.request_id] = result.outputs[0]
    assert list(finished["neighbour"].token_ids) == list(alone.outputs[0].token_ids)
    assert finished["wrong"].finish_reason == "error"
    assert not getattr(finished["wrong"], "item", None)
    assert not scheduler_of(llm).requests


def test_prompt_without_room(items_engine):
    llm = items_engine()
    with pytest.raises(ValueError, match="needs 4 tokens, the prompt of 253 tokens leaves 3"):
        llm.generate(
            [{"prompt_token_ids": [5] * 253}],
            items_params(4, "equal", max_tokens=4),
            use_tqdm=False,
        )


def test_new_version_while_serving(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(watched_file, "INTERVAL", 1e-9)
    path = write(tmp_path / "items.trie", FEW)
    llm = engine(**OPTIONS, additional_config={"vllm_trie": {"items": {"items": str(path)}}})

    def served():
        (result,) = llm.generate(
            [{"prompt_token_ids": list(prompt(1, 9))}], items_params(4, "items"), use_tqdm=False
        )
        return {output.item for output in result.outputs if output.token_ids}

    assert served() == {1, 2, 3}
    (tmp_path / "damaged").write_bytes(b"damaged")
    (tmp_path / "damaged").replace(path)  # the version before goes on
    assert served() == {1, 2, 3}
    write(path, {(7, 8): 70, (8, 9): 80})
    deadline = time.monotonic() + 30
    while served() != {70, 80} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert served() == {70, 80}
    Path(path).unlink()
    assert served() == {70, 80}
