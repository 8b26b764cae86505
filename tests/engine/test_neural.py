"""vLLM's trained drafters in a union: plain vLLM's tokens, the drafts of vLLM's own methods."""

from __future__ import annotations

import itertools

import pytest
from vllm import SamplingParams

from tests.engine.compare import (
    check_outputs_beside_aborts,
    check_same_outputs,
    differences,
    generate,
    preemptions,
    speculation,
    tell_oracle,
)
from tests.engine.conftest import runner_of, trees_of
from tests.engine.neural_heads import make_draft_model, make_eagle_head, make_mtp_model
from tests.engine.prompts import prompts
from vllm_trie.lab.tiny_model import model_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
COUNT = 12
LITTLE_ROOM = {
    "max_num_batched_tokens": 96,
    "enable_chunked_prefill": True,
    "max_model_len": 640,
    "num_gpu_blocks_override": 24,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """EAGLE heads that guess at random, a draft model and an MTP layer that are often right."""
    folder = tmp_path_factory.mktemp("neural")
    return {
        "eagle": make_eagle_head(folder / "head"),
        "eagle3": make_eagle_head(folder / "head_3", "eagle3"),
        "draft_model": make_draft_model(folder / "draft", num_layers=3),
        "mtp": make_mtp_model(folder / "mtp"),  # with its target
    }


def expected_of(engine, expected, target, count):
    """Plain vLLM's outputs of the shipped model, or of another target."""
    return generate(engine(**target), prompts(count), GREEDY) if target else expected[:count]


def part(checkpoints, method, length):
    """A trained drafter as vLLM's method or an entry of a union, and the engine options of its
    target."""
    entry = {"method": method, "num_speculative_tokens": length}
    if method == "mtp":
        return entry, {"model": checkpoints[method], "tokenizer": str(model_path())}
    return {**entry, "model": checkpoints[method]}, {}


def union(checkpoints, method, *others, num_nodes=16, **options):
    """Engine options of a union with a trained drafter that drafts in every step."""
    entry, target = part(checkpoints, method, 3)
    settings = {"drafters": [*others, entry], "adaptive": False, **options}
    return {**target, **speculation("trie_union", num_nodes, **settings)}


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_little_room(engine, checkpoints, expected, method):
    """Trees with prompts in parts, a prefix cache, preemptions and aborts."""
    llm = engine(**union(checkpoints, method, "ngram_trie"), **LITTLE_ROOM)
    with preemptions(llm) as preempted:
        check_same_outputs(llm, expected, GREEDY)
    assert preempted
    check_outputs_beside_aborts(llm, expected[:8], GREEDY, {2: (1, 5), 4: (2, 6)})
    adapter = runner_of(llm).adapter
    assert not [name for name in adapter.neural._waiting if name.startswith("abort-")]
    assert not any(trees_of(llm).guard.failures.values())


def test_seeded_sampling(engine, checkpoints):
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=100 + i, max_tokens=24, ignore_eos=True)
        for i in range(6)
    ]
    plain = generate(engine(), prompts(6), params)
    llm = engine(**union(checkpoints, "draft_model", "ngram_trie"))
    assert check_same_outputs(llm, plain, params) > 0.1


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_chains_accept_what_vllms_own_method_accepts(engine, checkpoints, expected, method):
    """The same checkpoint, the same length: vLLM's method against the part alone, twice, so that
    the second time the prefix cache serves the prompts."""
    entry, target = part(checkpoints, method, 3)
    plain = expected_of(engine, expected, target, 6)
    vllms = engine(speculative_config=entry, **target)
    ours = engine(**union(checkpoints, method, num_nodes=3, verification="chain"))
    accepted = count_accepted(vllms), count_accepted(ours)
    for _ in range(2):
        outputs = generate(vllms, prompts(6), GREEDY)
        assert differences(plain, outputs) == []
        check_same_outputs(ours, plain, GREEDY)
        assert sum(accepted[0]) == sum(accepted[1])
    assert not any(trees_of(ours).guard.failures.values())


@pytest.mark.usefixtures("test_drafters")
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_drafts_are_those_after_a_prefill(engine, checkpoints, expected, method, monkeypatch):
    """After trees with rejected branches and steps without drafts, in which accepted tokens wait,
    the drafter says what it says of the same text as a prompt."""
    plain = expected_of(engine, expected, part(checkpoints, method, 3)[1], 4)
    tell_oracle(plain)  # whose trees have the accepted nodes in all places
    options = union(checkpoints, method, "test_oracle", node_budget="adaptive")
    llm = engine(**options, enable_prefix_caching=False)
    neural, budget = runner_of(llm).adapter.neural, trees_of(llm).budget
    drafts: dict[tuple[int, ...], list[int]] = {}
    draft, turns = neural.draft, itertools.count()

    def noted(request_ids):
        chains = draft(request_ids)
        batch = runner_of(llm).input_batch
        for request_id, tokens in zip(request_ids, chains.token_ids, strict=True):
            row = batch.req_id_to_index[request_id]
            text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
            drafts[tuple(text.tolist())] = tokens[:, 0].tolist()
        return chains

    monkeypatch.setattr(neural, "draft", noted)
    monkeypatch.setattr(budget, "should_draft", lambda _: next(turns) % 4 < 2)
    assert check_same_outputs(llm, plain, GREEDY) > 0.01
    chosen = dict(list(drafts.items())[::-2][:16])
    assert len(chosen) >= 8
    monkeypatch.setattr(budget, "should_draft", lambda _: True)
    drafts.clear()
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
    generate(llm, [{"prompt_token_ids": list(text[:-1])} for text in chosen], params)
    assert {text: drafts[text] for text in chosen} == chosen


def count_accepted(llm) -> list[int]:
    """Return a list that the tokens which a step accepts for a request are added to, without those
    behind the request's end.

    vLLM's metrics do not serve: in a process they are those of the engine that was made last.
    """
    core, accepted = llm.llm_engine.engine_core, []
    stock = core.get_output

    def get_output():
        result = stock()
        accepted.extend(
            len(output.new_token_ids) - 1 for output in result.outputs if output.new_token_ids
        )
        return result

    core.get_output = get_output
    return accepted
