"""The trie and its file: what is built, and all that can be wrong with a file or its source."""

from __future__ import annotations

import hashlib
import json
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.extras.items.unit.catalogues import PlainTrie, random_items, trie_of, write
from vllm_trie.cli import app
from vllm_trie.extras.items.build import build_items
from vllm_trie.extras.items.sources import read_items
from vllm_trie.extras.items.trie import ROOT
from vllm_trie.extras.items.trie_file import ItemsError, open_items
from vllm_trie.files.checked_file import PREFIX
from vllm_trie.lab.tiny_model import model_path

SMALL = {(1, 2, 3): 7, (1, 2): 8, (4,): 9, (1, 5, 0): 3}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "items.trie", SMALL)


def check_equal(trie, items) -> None:
    """Walk the whole trie and compare it with the items."""
    plain = PlainTrie(items)
    paths = {0: ()}
    nodes = np.array([0])
    seen = {}
    while len(nodes):
        children = trie.children(nodes)
        tokens = trie.tokens[children.nodes]
        for index, node in enumerate(nodes.tolist()):
            mine = children.parents == index
            assert tokens[mine].tolist() == plain.allowed(paths[node], None)
        for parent, node, token in zip(*children, tokens, strict=True):
            paths[int(node)] = (*paths[int(nodes[parent])], int(token))
        nodes = children.nodes
        terminal = trie.is_terminal(nodes)
        assert terminal.tolist() == [paths[n] in items for n in nodes.tolist()]
        expected = [paths[n] in plain.next_tokens for n in nodes.tolist()]
        assert trie.has_children(nodes).tolist() == expected
        ids = trie.item_ids(nodes[terminal])
        seen |= {paths[n]: i for n, i in zip(nodes[terminal].tolist(), ids, strict=True)}
    assert seen == items
    assert trie.num_items == len(items)
    assert trie.num_nodes == len(paths)
    for number in list(items.values())[:: max(1, len(items) // 50)]:
        leaves = trie.find_all([path for path, item_id in items.items() if item_id == number])
        assert trie.find_ids([number]).tolist() == sorted(leaves.tolist())
    places = {path: node for node, path in paths.items()}
    for node in list(paths)[:: max(1, len(paths) // 50)]:
        assert trie.find_all([paths[node]]).tolist() == [node]
        if node != ROOT:
            assert trie.parents(np.array([node])).tolist() == [places[paths[node][:-1]]]


@pytest.mark.parametrize("text_ids", [False, True])
def test_built_trie_holds_exactly_the_items(tmp_path, monkeypatch, text_ids):
    monkeypatch.setattr("vllm_trie.extras.items.sources._BATCH", 50)
    items = random_items(1, 3000, vocab=9)
    trie = trie_of(tmp_path / "items.trie", items, text_ids)
    check_equal(trie, {k: f"item {i}" for k, i in items.items()} if text_ids else items)


def test_tokens_of_all_sizes_keep_their_order(tmp_path):
    tokens = [0, 1, 254, 255, 256, 65534, 65535, 65536, 2**24 - 1, 2**24, 2**31 - 2]
    items = {(a, b): 100 * i + j for i, a in enumerate(tokens) for j, b in enumerate(tokens)}
    check_equal(trie_of(tmp_path / "items.trie", items), items)


def test_nothing_is_outside_of_the_trie(path):
    trie = open_items(path)
    for outside in ([0], [5], [1, 6], [1, 2, 3, 4], [4, 1], [2**31 - 1]):
        assert not trie.find_all([outside]).size
    with pytest.raises(ValueError, match="no item ends at node 0"):
        trie.item_ids(np.array([0]))


def test_array_with_padding(tmp_path):
    array = np.array([[5, 6, -1], [5, -1, -7], [0, 1, 2]], dtype=np.int16)
    np.save(tmp_path / "items.npy", array)
    build_items(tmp_path / "items.trie", read_items(tmp_path / "items.npy"))
    check_equal(open_items(tmp_path / "items.trie"), {(5, 6): 0, (5,): 1, (0, 1, 2): 2})


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([[1, -1, 2]], "row 0: a token follows the padding"),
        ([[1, 2], [-1, -1]], "row 1: the item has no tokens"),
        ([[1, 2], [3, 10]], r"row 1: a token is outside of \[0, 9\]"),
        ([1, 2], r"shape \[items, 1 to 512\], this is int64 \(2,\)"),
        ([[0.5]], "this is float64"),
    ],
)
def test_wrong_arrays(tmp_path, array, message):
    np.save(tmp_path / "items.npy", np.array(array))
    with pytest.raises(ItemsError, match=message):
        list(read_items(tmp_path / "items.npy", vocab_size=10))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": 1, "tokens": [1, 2}', "line 3: this is not JSON"),
        ('{"id": 1, "tokens": []}', "line 3: the item has no tokens; an item has 1 to 512"),
        ('{"id": 1, "tokens": [1, 10]}', r"line 3: token 10 is outside of \[0, 9\]"),
        ('{"id": 1, "tokens": [-1]}', r"line 3: token -1 is outside of"),
        ('{"id": 1, "tokens": [99999999999999999999]}', "line 3: token 9+ is outside of"),
        ('{"id": 1, "tokens": [1.0]}', "line 3: token 1.0 must be an integer"),
        ('{"id": 1, "tokens": [true]}', "line 3: token True must be an integer"),
        ('{"id": 1, "tokens": "12"}', "line 3: tokens must be a list of integers, got '12'"),
        ('{"id": 1}', "line 3: the item has neither 'tokens' .* nor 'text'"),
        ('{"id": 1, "text": "a"}', "line 3: the item has a 'text'; name the model's tokenizer"),
        ('{"id": 1, "tokens": [1], "weight": "a"}', "line 3: weight 'a' must be a number from -1e"),
        ('{"id": 1, "tokens": [1], "weight": 1e999}', "line 3: weight inf must be a number"),
        ('{"tokens": [1]}', "line 3: an item must be an object with 'id'"),
        ("[1]", "line 3: an item must be an object"),
        ('{"id": "a", "tokens": [1]}', "line 3: id 'a' is of another type than 5"),
        ('{"id": null, "tokens": [1]}', "line 3: id None must be a string or an integer"),
        ('{"id": 9223372036854775808, "tokens": [1]}', "line 3: id .* does not fit into 64 bits"),
        ('{"id": 1, "tokens": [1]}, {"id": 2, "tokens": [2]}', "line 3: this is not JSON"),
    ],
)
def test_wrong_lines(tmp_path, line, message):
    source = tmp_path / "items.jsonl"
    source.write_text('{"id": 5, "tokens": [3]}\n\n' + line + "\n")
    with pytest.raises(ItemsError, match=message):
        list(read_items(source, vocab_size=10))


def test_ids_are_unicode_text(tmp_path):
    source = tmp_path / "items.jsonl"
    source.write_text('{"id": "é", "tokens": [3]}\n{"id": "\\ud83d", "tokens": [1]}\n')
    with pytest.raises(ItemsError, match=r"line 2: id .* has half a surrogate pair"):
        list(read_items(source))


def test_ids_of_different_types_in_distant_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_trie.extras.items.sources._BATCH", 1)
    source = tmp_path / "items.jsonl"
    source.write_text('{"id": 5, "tokens": [3]}\n{"id": "a", "tokens": [4]}\n')
    with pytest.raises(ItemsError, match="some ids are strings and others integers"):
        build_items(tmp_path / "items.trie", read_items(source))


def test_duplicates(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_trie.extras.items.sources._BATCH", 1)
    source, target = tmp_path / "items.jsonl", tmp_path / "items.trie"
    items = [([n % 7, 3], f"n{n}") for n in range(20)]
    source.write_text("\n".join(json.dumps({"id": i, "tokens": t}) for t, i in items))
    with pytest.raises(ItemsError, match=r"items 'n0' and 'n7' have the same tokens \[0, 3\]"):
        build_items(target, read_items(source))
    assert list(tmp_path.iterdir()) == [source]
    build_items(target, read_items(source), duplicates="first")
    check_equal(open_items(target), {(n, 3): f"n{n}" for n in range(7)})


def test_empty_and_foreign_sources(tmp_path):
    (tmp_path / "items.jsonl").write_text("\n\n")
    with pytest.raises(ItemsError, match="the catalogue has no items"):
        build_items(tmp_path / "items.trie", read_items(tmp_path / "items.jsonl"))
    with pytest.raises(ItemsError, match=r"items.csv is not \*.jsonl or \*.npy"):
        read_items(tmp_path / "items.csv")
    (tmp_path / "items.npy").write_text("not an array")
    with pytest.raises(ItemsError, match="cannot be read as a NumPy array"):
        list(read_items(tmp_path / "items.npy"))


# -- the file --------------------------------------------------------------------------------------


def test_tokens_must_fit_the_vocabulary(path):
    open_items(path, vocab_size=6)
    with pytest.raises(ItemsError, match="it has token 5, the model's vocabulary has 5 tokens"):
        open_items(path, vocab_size=5)


def test_another_version_than_the_scheduler_has_is_refused(path):
    version = open_items(path).version
    open_items(path, version=version)
    write(path, {(1, 2): 3})
    with pytest.raises(ItemsError, match=f"not {version[:16]}"):
        open_items(path, version=version)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_forged_file_with_a_right_digest_is_no_other_trie(path, data):
    """Numbers are changed and the digest made to match: refused, or a sound trie."""
    content = bytearray(path.read_bytes())
    _, _, size, _ = PREFIX.unpack(content[: PREFIX.size])
    begin = -(-(PREFIX.size + size) // 64) * 64
    for _ in range(data.draw(st.integers(1, 4))):
        place = begin + 4 * data.draw(st.integers(0, (len(content) - begin) // 4 - 1))
        value = data.draw(st.one_of(st.integers(-3, 12), st.sampled_from([2**31 - 1, -(2**31)])))
        content[place : place + 4] = value.to_bytes(4, "little", signed=True)
    content[16:48] = hashlib.sha256(content[PREFIX.size :]).digest()
    forged = path.with_suffix(".forged")
    forged.write_bytes(content)
    try:
        trie = open_items(forged, vocab_size=12)
    except ItemsError:
        return
    nodes, depth, count = np.array([0]), 0, 0
    while len(nodes):
        children = trie.children(nodes)
        tokens = trie.tokens[children.nodes]
        pairs = list(zip(children.parents.tolist(), tokens.tolist(), strict=True))
        assert pairs == sorted(set(pairs))
        assert all(0 <= token < 12 for _, token in pairs)
        nodes, depth = children.nodes, depth + 1
        count += len(trie.item_ids(nodes[trie.is_terminal(nodes)]))
    assert depth - 1 == trie.max_length
    assert count == trie.num_items


@pytest.mark.parametrize("fault", ["not UTF-8", "half a character"])
def test_forged_ids_are_refused(tmp_path, fault):
    """They are found out before a request meets them."""
    items = {(1, 2): 1, (1, 3): 2, (4,): 3}
    path = write(tmp_path / "a.trie", items, text_ids=True)
    content = bytearray(path.read_bytes())
    texts = content.rindex(b"item 1item 2item 3")
    if fault == "not UTF-8":
        content[texts] = 0xFF
    else:
        content[texts + 5 : texts + 7] = "\u00e9".encode()  # the second id begins within it
    content[16:48] = hashlib.sha256(content[PREFIX.size :]).digest()
    path.write_bytes(content)
    with pytest.raises(ItemsError, match="not UTF-8"):
        open_items(path)


def test_a_long_id_costs_opening_its_length(tmp_path):
    """Not the number of all ids for each of its characters."""
    seconds = []
    for number, last in enumerate(["short", 12_500 * "long"]):
        source, target = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.trie"
        ids = [*map(str, range(10**5)), last]
        lines = (json.dumps({"id": ids[i], "tokens": [i]}) for i in range(len(ids)))
        source.write_text("\n".join(lines))
        build_items(target, read_items(source))
        begin = time.process_time()
        trie = open_items(target)
        seconds.append(time.process_time() - begin)
        assert trie.item_ids(trie.find_ids([last])) == [last]
    assert seconds[1] < 8 * seconds[0]


# -- commands --------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["items", *map(str, arguments)])
    return done.exit_code, done.output


def test_commands(tmp_path):
    source, target = tmp_path / "items.jsonl", tmp_path / "items.trie"
    source.write_text('{"id": "a", "text": "return x"}\n{"id": "b", "tokens": [5, 6]}\n')
    assert run("build", source, "-o", target)[0] == 1
    code, text = run("build", source, "-o", target, "--tokenizer", model_path())
    assert code == 0, text
    assert run("info", target) == (0, text)
    assert "2 items of" in text
    code, text = run("check", target)
    assert (code, "good, version" in text) == (0, True)
    code, text = run("check", target, "--vocab-size", 6)
    assert code == 1
    assert "vocabulary has 6 tokens" in text
    target.write_bytes(target.read_bytes()[:-1])
    assert run("check", target)[0] == run("info", target)[0] == 1
