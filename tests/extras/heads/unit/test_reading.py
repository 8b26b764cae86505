"""Reading heads in both layouts, and refusing what does not fit."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.extras.heads.unit.support import (
    HIDDEN,
    VOCAB,
    describe,
    make_medusa,
    make_requests,
    random_heads,
)
from tests.processes import run_python
from tests.unit.drafters.support import make_context
from vllm_trie.drafts import parse_options
from vllm_trie.extras.heads.drafter import MedusaDrafter
from vllm_trie.extras.heads.reading import CheckpointError, load_checkpoint
from vllm_trie.extras.heads.training.writing import save_vllm


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = change(load_file(str(path)))
    save_file({name: value.contiguous() for name, value in tensors.items()}, str(path))


def drafts(path, **options):
    drafter = make_medusa(path=path, **options)
    drafter.load_model(None)
    return describe(drafter.propose(make_requests()))


def save_fasterdecoding(heads, folder):
    """As its own code does, whose blocks always have a bias."""
    shape, tensors = heads.shape, {}
    for head, weights in enumerate(heads.block_weight):
        for layer, weight in enumerate(weights):
            bias = heads.block_bias[head, layer] if shape.has_bias else torch.zeros_like(weight[0])
            tensors |= {
                f"{head}.{layer}.linear.weight": weight,
                f"{head}.{layer}.linear.bias": bias,
            }
        tensors[f"{head}.{shape.num_layers}.weight"] = heads.output_weight[head]
    folder.mkdir(exist_ok=True)
    stored = {name: value.detach().bfloat16().clone() for name, value in tensors.items()}
    torch.save(stored, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": shape.num_heads}))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_all_layouts_give_the_same_drafts(tmp_path, num_layers, has_bias):
    heads = random_heads(num_layers=num_layers, has_bias=has_bias)
    save_vllm(heads, tmp_path / "vllm")
    save_fasterdecoding(heads, tmp_path / "pt")
    shutil.copytree(tmp_path / "pt", tmp_path / "safetensors")
    file = tmp_path / "safetensors" / "medusa_lm_head.pt"
    save_file(torch.load(file), str(file.with_suffix(".safetensors")))
    file.unlink()
    expected = describe(make_medusa(heads).propose(make_requests()))
    for layout in ("vllm", "pt", "safetensors"):
        assert drafts(tmp_path / layout) == expected


def test_layouts_are_those_that_others_write(tmp_path):
    """Names and shapes written out by hand, not by the code under test."""
    heads = random_heads(num_heads=2, has_bias=True)
    expected = describe(make_medusa(heads).propose(make_requests()))
    tensors = {}
    for head in range(2):
        tensors[f"blocks.{head}.layers.0.weight"] = heads.block_weight[head, 0]
        tensors[f"blocks.{head}.layers.0.bias"] = heads.block_bias[head, 0]
        tensors[f"lm_heads.{head}.weight"] = heads.output_weight[head]
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert drafts(tmp_path) == expected
    save_fasterdecoding(heads, tmp_path / "theirs")
    theirs = torch.load(tmp_path / "theirs" / "medusa_lm_head.pt")
    prefixed = {f"medusa_heads.{name}": tensor for name, tensor in theirs.items()}
    save_file(prefixed, str(tmp_path / "model.safetensors"))
    assert drafts(tmp_path) == expected


def test_more_heads_in_the_file_than_the_configuration_says(tmp_path):
    """As in FasterDecoding's first published checkpoints."""
    save_fasterdecoding(random_heads(num_heads=3), tmp_path)
    edit_config(tmp_path, medusa_num_heads=2)
    assert load_checkpoint(tmp_path, HIDDEN, VOCAB).heads.shape.num_heads == 3


def test_token_map(tmp_path):
    heads = random_heads(num_outputs=20)
    heads.token_map = torch.randperm(VOCAB)[:20]
    save_vllm(heads, tmp_path)
    expected = describe(make_medusa(heads).propose(make_requests()))
    assert drafts(tmp_path) == expected
    allowed = set(heads.token_map.tolist())
    assert all(set(tokens[:1]) <= allowed for tokens, _, _ in drafts(tmp_path, joint="product"))

    def whole(tensors):
        """vLLM also takes whole output layers with a map, and picks its rows."""
        for head in range(3):
            rows = torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)
            rows[heads.token_map] = tensors[f"lm_heads.{head}.weight"]
            tensors[f"lm_heads.{head}.weight"] = rows
        return tensors

    edit_tensors(tmp_path, whole)
    assert drafts(tmp_path) == expected


def test_a_single_head_may_use_the_models_output_layer(tmp_path):
    heads = random_heads(num_heads=1, shares_output=True)
    save_vllm(heads, tmp_path)
    loaded = load_checkpoint(tmp_path, HIDDEN, VOCAB, lambda: heads.output_weight[0]).heads
    assert loaded.shape == heads.shape
    hidden = torch.randn(5, HIDDEN)
    torch.testing.assert_close(loaded(hidden), heads(hidden))


def test_original_lm_head_in_the_file_or_in_the_model(tmp_path):
    heads = random_heads(shares_output=True)
    save_vllm(heads, tmp_path)
    expected = describe(make_medusa(heads).propose(make_requests()))
    edit_tensors(tmp_path, put("lm_head.weight", heads.output_weight[0].detach().bfloat16()))
    assert drafts(tmp_path) == expected
    edit_tensors(tmp_path, drop("lm_head.weight"))
    drafter = make_medusa(path=tmp_path)
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(HIDDEN, VOCAB + 4, bias=False)  # vLLM pads the rows
    with torch.no_grad():
        model.lm_head.weight[:VOCAB] = heads.output_weight[0]
    drafter.load_model(model)
    assert describe(drafter.propose(make_requests())) == expected
    with pytest.raises(CheckpointError, match="original_lm_head"):
        make_medusa(path=tmp_path).load_model(torch.nn.Module())


def test_heads_of_a_revision(tmp_path, monkeypatch):
    save_vllm(random_heads(), tmp_path)
    snapshots = {("some/heads", "older"): str(tmp_path)}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, *, revision, **_: snapshots[name, revision],
    )
    names = {"draft_model": "some/heads", "draft_revision": "older"}
    context = make_context(vocab_size=VOCAB, hidden_size=HIDDEN, **names)
    MedusaDrafter(parse_options("medusa_dynamic", {}), context).load_model(None)


WITH_TWO_RANKS = """
import json, sys, torch
from tests.extras.heads.unit.support import HIDDEN, VOCAB
from tests.unit.drafters.support import make_context
from vllm_trie.extras.heads.output_layer import target_output_layer
sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "tensor_parallel_size": 2}
for model in json.loads(sys.argv[1]):
    layer = target_output_layer(torch.nn.Module(), make_context(**model, **sizes))
    print(layer.sum().item())
"""


def test_the_output_layer_of_a_model_on_two_ranks(tmp_path):
    """From the model's files, where the hub's cache or vLLM's has them by name."""
    sums, snapshots = [], []
    for cache, revision in (("hub", "main"), ("vllm", "older")):
        weight = random_heads(seed=len(sums)).output_weight[0].detach().contiguous()
        repository = tmp_path / cache / "models--some--model"
        snapshots.append(repository / "snapshots" / "0123")
        for folder in (snapshots[-1], repository / "refs"):
            folder.mkdir(parents=True)
        (repository / "refs" / revision).write_text("0123")
        save_file({"lm_head.weight": weight}, str(snapshots[-1] / "model.safetensors"))
        sums.append(weight.sum().item())
    by_name = {"model": "some/model"}
    in_vllms = {**by_name, "revision": "older", "download_dir": str(tmp_path / "vllm")}
    models = json.dumps([{"model": str(snapshots[0])}, by_name, in_vllms])
    printed = run_python("-c", WITH_TWO_RANKS, models, HF_HOME=str(tmp_path)).stdout
    assert [*map(float, printed.split())] == [sums[0], *sums]


def drop(*names):
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


def put(name, value):
    return lambda tensors: {**tensors, name: value}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("lm_heads.1.weight"), "lacks 'lm_heads.1.weight'; the file is incomplete"),
        (drop("blocks.1.layers.0.weight"), "the file is incomplete"),
        (put("lm_heads.2.weight", torch.zeros(VOCAB + 1, HIDDEN)), "another model or vocabulary"),
        (put("lm_heads.2.weight", torch.zeros(VOCAB, HIDDEN + 1)), "hidden size 16"),
        (put("blocks.2.layers.0.weight", torch.zeros(HIDDEN, 4)), "another model"),
        (put("blocks.1.layers.0.bias", torch.zeros(HIDDEN)), "lacks 'blocks.0.layers.0.bias'"),
        (lambda _: {"model.norm.weight": torch.zeros(3)}, "no tensors of Medusa heads"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, words):
    save_vllm(random_heads(), tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path, HIDDEN, VOCAB)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 5}, "num_heads=5, but"),
        ({"truncated_vocab_size": 10}, "has no token_map"),
        ({"head_temperatures": [1.0]}, "list of 3 numbers"),
        ({"head_temperatures": [1.0, 0.0, 1.0]}, "from 0.05 to 20"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path, changes, words):
    save_vllm(random_heads(), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path, HIDDEN, VOCAB)


@pytest.mark.parametrize("token_map", [[0, 1, 1, 2], [0, 1, 2, VOCAB], [[0, 1, 2, 3]]])
def test_token_maps_that_do_not_fit(tmp_path, token_map):
    heads = random_heads(num_outputs=4)
    heads.token_map = torch.arange(4)
    save_vllm(heads, tmp_path)
    edit_tensors(tmp_path, put("token_map", torch.tensor(token_map)))
    with pytest.raises(CheckpointError, match="token_map"):
        load_checkpoint(tmp_path, HIDDEN, VOCAB)


def test_a_model_of_another_size(tmp_path):
    save_vllm(random_heads(), tmp_path)
    with pytest.raises(CheckpointError, match="another model or vocabulary"):
        load_checkpoint(tmp_path, HIDDEN, VOCAB + 4)
    with pytest.raises(CheckpointError, match="another model"):
        load_checkpoint(tmp_path, HIDDEN * 2, VOCAB)


class Payload:
    """Unpickled without care, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_not_run(tmp_path):
    torch.save({"0.0.linear.weight": Payload(tmp_path / "ran")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        load_checkpoint(tmp_path, HIDDEN, VOCAB)
    assert not (tmp_path / "ran").exists()


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(CheckpointError, match="holds no Medusa heads"):
        load_checkpoint(tmp_path, HIDDEN, VOCAB)
    with pytest.raises(CheckpointError, match="neither a folder nor the name"):
        load_checkpoint(tmp_path / "absent", HIDDEN, VOCAB)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path, HIDDEN, VOCAB)
    save_vllm(random_heads(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_checkpoint(tmp_path, HIDDEN, VOCAB)
