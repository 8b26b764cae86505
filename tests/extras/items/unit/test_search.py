"""The constrained search against the reference."""

from __future__ import annotations

from collections import ChainMap
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.extras.items.unit.catalogues import (
    PlainTrie,
    random_items,
    selected_items,
    trie_of,
    weight_of,
)
from tests.unit.beam.models import extended, random_model, scores_of, tokens_of
from tests.unit.beam.reference import reference_search
from vllm_trie.extras.items.search import ItemSearch
from vllm_trie.extras.items.selection import Rules, SelectedTrie, select
from vllm_trie.extras.items.step import ItemStep, best_continuations
from vllm_trie.extras.items.worker import ItemSelection
from vllm_trie.searches import Draws, SearchSettings
from vllm_trie.searches.blocks import TokenRules
from vllm_trie.searches.engine.search_wire import TokenSelection
from vllm_trie.searches.engine.worker.selection import Selector

EOS = 0
VOCAB = 9
RULES = [Rules(deny_prefixes=[[3], [1, 2]]), Rules(allow_items=range(999, 1050)), Rules([])]


def run_items(
    next_logits, trie, search_settings, eos=None, normalize="vocabulary", weight_factor=0.0
) -> ItemSearch:
    """Drive a search as the engine does: all rows' logits, then the valid candidates only."""
    tree, valid_part = getattr(trie, "trie", trie), getattr(trie, "valid_part", None)
    search = ItemSearch(tree, valid_part, normalize, search_settings, eos, weight_factor)
    rows = [[]]
    while not search.search.done:
        step = ItemStep(
            search.nodes, search.search.totals, search_settings.beam_width, eos, weight_factor
        )
        (candidates,) = best_continuations([trie], [step], next_logits(rows), normalize).fetch()
        rows = extended(rows, search.advance(candidates))
        assert tree.find_all(rows).tolist() == search.nodes.tolist()
    return search


def masked(model, plain: PlainTrie, eos: int | None, normalize: str):
    """Log-probabilities over the vocabulary, -inf where nothing valid follows."""

    def next_logprobs(token_ids):
        logprobs = model(token_ids)
        allowed = plain.allowed(tuple(token_ids), eos)
        result = np.full_like(logprobs, -np.inf)
        result[allowed] = logprobs[allowed]
        if normalize == "valid" and allowed:
            result -= np.float32(np.logaddexp.reduce(logprobs[allowed].astype(np.float64)))
        return result

    return next_logprobs


@pytest.fixture(scope="module")
def catalogues(tmp_path_factory):
    folder = tmp_path_factory.mktemp("catalogues")
    catalogues = [
        random_items(seed, count, VOCAB, lengths)
        for seed, (count, lengths) in enumerate(
            [(3, (1, 3)), (40, (1, 4)), (300, (3, 5)), (300, (4, 4)), (2000, (2, 7))]
        )
    ]
    return [
        (trie_of(folder / f"{i}.trie", items, weights=True), PlainTrie(items))
        for i, items in enumerate(catalogues)
    ]


@settings(max_examples=150, deadline=None)
@given(
    number=st.integers(0, 4),
    width=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    eos=st.sampled_from([None, EOS]),
    normalize=st.sampled_from(["vocabulary", "valid"]),
    weight_factor=st.sampled_from([0.0, 0.0, 1.0, -3.0]),
    rules=st.sampled_from([None, *RULES]),
    missing=st.sampled_from([0, 0, 1]),
)
def test_equals_reference(
    catalogues, number, width, seed, length_penalty, early_stopping, eos, normalize, weight_factor,
    rules, missing,
):  # fmt: skip
    """With too few tokens for the longest items, if `missing`."""
    trie, plain = catalogues[number]
    if rules is not None:
        plain = PlainTrie(selected_items(plain.items, plain.items, rules))
        trie = SelectedTrie(trie, select(trie, rules))
    weights = {tokens: weight_factor * weight_of(value) for tokens, value in plain.items.items()}
    search_settings = SearchSettings(
        beam_width=width,
        max_new_tokens=catalogues[number][0].max_length + (-missing if eos is None else 1),
        stop_token_ids=() if eos is None else (eos,),
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    model = random_model(seed, vocab=VOCAB)
    search = run_items(
        lambda rows: torch.from_numpy(np.stack([model(row) for row in rows])),
        trie, search_settings, eos, normalize, weight_factor,
    )  # fmt: skip
    item_ids = catalogues[number][1].items.values()  # those that rules exclude, too
    most_added = max(weight_factor * weight_of(item_id) for item_id in item_ids)
    assert search.search.settings.most_added == pytest.approx(most_added)
    hypotheses = search.hypotheses()
    outcome = None
    if eos is None:
        outcome = plain.outcome
    elif weight_factor:
        outcome = lambda tokens: (tokens[-1] == eos, tokens[-1] != eos)  # noqa: E731
    expected = reference_search(
        masked(model, plain, eos, normalize),
        search.search.settings,
        outcome=outcome,
        added=lambda tokens: weights[tuple(tokens if eos is None else tokens[:-1])],
    )
    assert tokens_of(hypotheses) == tokens_of(expected)
    np.testing.assert_allclose(scores_of(hypotheses), scores_of(expected), atol=1e-4)
    items = [
        tuple(hypothesis.token_ids if eos is None else hypothesis.token_ids[:-1])
        for hypothesis in hypotheses
    ]
    for hypothesis, item in zip(hypotheses, items, strict=True):
        total = sum(hypothesis.logprobs) + weights[item]
        assert total == pytest.approx(hypothesis.sum_logprob, abs=1e-4)
    item_ids = [search.described(hypothesis)[0] for hypothesis in hypotheses]
    assert item_ids == [plain.items[item] for item in items]
    assert len(set(items)) == len(items)


def test_a_row_of_nan_takes_no_place_of_others(catalogues):
    trie, _ = catalogues[2]
    nodes = trie.children(np.array([0])).nodes[:2]
    logits = torch.zeros(2, VOCAB)
    logits[0] = torch.nan
    step = ItemStep(nodes, np.zeros(2, dtype=np.float32), 2)
    (best,) = best_continuations([trie], [step], logits).fetch()
    assert len(best.logprobs)
    assert np.isfinite(best.logprobs).all()


def nodes_at(trie, random, count: int) -> np.ndarray:
    """Nodes of one depth, some of them twice."""
    nodes = np.array([0], dtype=np.int32)
    for _ in range(random.integers(trie.max_length - 1)):
        nodes = trie.children(nodes).nodes
    return random.choice(nodes, size=count)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_searches_of_one_step_do_not_see_one_another(catalogues, plugin_log, waits, seed):
    """Of several widths, inside catalogues and free, with ties; one whose catalogue is gone."""
    random = np.random.default_rng(seed)
    selections: list[Any] = []
    rows: dict[str, np.ndarray] = {}
    kept = {(ItemSelection, str(i)): {"": trie} for i, (trie, _) in enumerate(catalogues)}
    for number, width in enumerate([2, 5, 5, 1, 5, 3, 5, 2, 5, 5, 7, 7]):
        name, totals = str(number), -random.random(width).round(1).astype(np.float32)
        rows[name] = sum(map(len, rows.values())) + np.arange(width)
        if number % 2:
            i = random.integers(len(catalogues))
            eos, weight = [None, EOS][number // 2 % 2], float(random.choice([0.0, 2.0]))
            nodes = nodes_at(catalogues[i][0], random, width)
            normalize = ["vocabulary", "valid"][number // 4 % 2]
            step = ItemStep(nodes, totals, width, eos, weight)
            selections.append(ItemSelection(str(i), "", "", name, normalize, None, step))
        else:
            bias = TokenRules(np.arange(3), np.ones(3, dtype=np.float32), None)
            rules, draws = bias if number == 4 else None, Draws(1.5, 7) if number == 6 else None
            stops = None if rules or draws or waits else (0,)
            selections.append(TokenSelection(name, totals, 2 * width, rules, draws, stops))
    selections.append(selections[1]._replace(path="gone", memory="gone", proxy_id="gone"))
    rows["gone"] = rows["1"]
    if seed % 2:  # their rows are not one behind another
        order = random.permutation(60)
        rows = {name: order[of_search] for name, of_search in rows.items()}
    logits = torch.from_numpy(random.normal(size=(60, 40)).round(1).astype(np.float32))

    def selected(selections: list[Any]) -> dict[str, Any]:
        selector = Selector(waits)
        selector.parts.kept |= kept
        selector.selections = selections
        selector.select({}, logits, rows)
        return dict(ChainMap(*(part.fetch() for part in selector.selected)))

    together = selected(selections)
    assert len(together) == 12
    assert "A beam search fails" in plugin_log.text
    for selection in selections[:-1]:
        (alone,) = selected([selection]).values()
        for one, other in zip(together[selection.proxy_id], alone, strict=True):
            np.testing.assert_array_equal(one, other)
