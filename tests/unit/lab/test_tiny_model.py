"""The shipped model's data, training code and files."""

from __future__ import annotations

import ast
import importlib
import io
import json
import random
import re
import shutil
import sysconfig
import tokenize
from pathlib import Path

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_trie.lab.tiny_model as tiny_model
from tools.tiny_model.data.corpus import HELD_OUT_MODULES, SourceFile, load_corpus
from tools.tiny_model.data.documents import DocumentMaker
from tools.tiny_model.data.edits import EDITS, Edit
from tools.tiny_model.data.excerpts import Excerpt, ExcerptSampler, join, parse_function
from tools.tiny_model.data.questions import QUESTIONS
from tools.tiny_model.data.tokenizer import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    SPECIAL_TOKENS,
    load_tokenizer,
    render_turns,
)

STDLIB = Path(sysconfig.get_paths()["stdlib"])
MODULES = ("textwrap.py", "queue.py", "shelve.py", "csv.py", "cmd.py", "json/decoder.py", "bdb.py")
WEIGHTS = Path(tiny_model.__file__).parent / "weights"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few of the standard library's files, laid out as there."""
    root = tmp_path_factory.mktemp("library")
    for name in MODULES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(STDLIB / name, root / name)
    (root / "test").mkdir()
    shutil.copy(STDLIB / "queue.py", root / "test" / "test_queue.py")
    (root / "short.py").write_text("x = 1\n")
    (root / "table.py").write_text("DATA = [" + "1234567890, " * 100 + "]\n")
    return root


@pytest.fixture(scope="module")
def files(library: Path) -> list[SourceFile]:
    corpus = load_corpus(library)
    return [*corpus.train, *corpus.held_out]


def edits(files: list[SourceFile], kind: str, count: int = 25) -> list[tuple[Excerpt, Edit]]:
    """Real excerpts with what one builder makes of them."""
    rng, sampler, pairs = random.Random(kind), ExcerptSampler(files), []
    for _ in range(2000):
        excerpt = sampler.draw(rng, 900)
        edit = excerpt and EDITS[kind][0](excerpt, rng, ["alpha", "other_name"])
        if excerpt and edit:
            pairs.append((excerpt, edit))
            if len(pairs) == count:
                break
    assert len(pairs) >= 3, f"{kind} fits almost nothing"
    return pairs


def body_without_docstring(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


# --- corpus ---------------------------------------------------------------------------------


def test_held_out_modules_and_their_tests_are_not_trained_on(library: Path) -> None:
    corpus = load_corpus(library)
    assert {file.path for file in corpus.train} == {"json/decoder.py", "bdb.py"}
    assert {file.module for file in corpus.held_out} <= HELD_OUT_MODULES
    assert "test/test_queue.py" in {file.path for file in corpus.held_out}


def test_an_empty_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python sources"):
        load_corpus(tmp_path)


# --- documents ------------------------------------------------------------------------------


def test_rename_renames_every_whole_word(files: list[SourceFile]) -> None:
    for excerpt, edit in edits(files, "rename"):
        names = re.findall(r"`(\w+)`", edit.instruction)
        old, new = names if re.search(rf"\b{names[1]}\b", edit.answer) else reversed(names)
        if not re.search(rf"\b{old}\b", excerpt.source):
            old, new = new, old
        assert not re.search(rf"\b{old}\b", edit.answer)
        assert re.sub(rf"\b{new}\b", old, edit.answer) == excerpt.source == edit.shown


def test_removing_comments_leaves_the_program_alone(files: list[SourceFile]) -> None:
    for excerpt, edit in edits(files, "remove_comments"):
        kinds = {t.type for t in tokenize.generate_tokens(io.StringIO(edit.answer).readline)}
        assert tokenize.COMMENT not in kinds
        assert ast.dump(ast.parse(edit.answer)) == ast.dump(ast.parse(excerpt.source))


def test_removing_docstrings_leaves_the_rest_alone(files: list[SourceFile]) -> None:
    for excerpt, edit in edits(files, "remove_docstrings"):
        assert '"""' in excerpt.source or "'" in excerpt.source or '"' in excerpt.source
        assert body_without_docstring(edit.answer) == body_without_docstring(excerpt.source)
        assert len(edit.answer) < len(edit.shown)


def test_outline_keeps_signatures_only(files: list[SourceFile]) -> None:
    for excerpt, edit in edits(files, "outline"):
        functions = ast.parse(edit.answer).body
        assert [f.name for f in functions] == [f.name for f in excerpt.functions]
        assert all(ast.unparse(f.body[0]) == "..." for f in functions)


def test_a_seeded_bug_touches_one_line(files: list[SourceFile]) -> None:
    for excerpt, edit in edits(files, "fix_bug"):
        shown, right = edit.shown.split("\n"), edit.answer.split("\n")
        assert edit.answer == excerpt.source
        assert sum(a != b for a, b in zip(shown, right, strict=True)) == 1


def test_logging_adds_one_first_statement_per_function(files: list[SourceFile]) -> None:
    for excerpt, edit in edits(files, "add_logging"):
        added = [
            line for line in edit.answer.split("\n") if re.fullmatch(r' +[\w.]+\("\w+"\)', line)
        ]
        assert len(added) >= len(excerpt.functions)
        for function in ast.parse(edit.answer).body:
            at = 1 if ast.get_docstring(function) is not None else 0
            assert function.name in ast.unparse(function.body[at])


def test_functions_are_shown_dropped_and_reversed(files: list[SourceFile]) -> None:
    for excerpt, edit in edits(files, "show_function"):
        assert edit.answer in [f.source for f in excerpt.functions]
    for excerpt, edit in edits(files, "drop_function"):
        kept = [f.source for f in excerpt.functions if f.source in edit.answer]
        assert join(kept) == edit.answer
        assert len(kept) == len(excerpt.functions) - 1
    for excerpt, edit in edits(files, "reverse_order"):
        names = [node.name for node in ast.parse(edit.answer).body]
        assert names == [f.name for f in excerpt.functions][::-1]


def test_a_class_gets_methods(files: list[SourceFile]) -> None:
    for excerpt, edit in edits(files, "wrap_in_class"):
        (made,) = ast.parse(edit.answer).body
        assert isinstance(made, ast.ClassDef)
        assert len(made.body) == len(excerpt.functions)
        assert all(method.args.args[0].arg == "self" for method in made.body)


@pytest.mark.parametrize("kind", sorted({**EDITS, **QUESTIONS}))
def test_every_kind_makes_a_chat_turn_that_ends(files: list[SourceFile], kind: str) -> None:
    maker, rng = DocumentMaker(files, ["alpha", "beta_names"]), random.Random(3)
    for _ in range(3):
        document = maker.make(rng, 900, kind)
        assert document.prompt.endswith(ASSISTANT)
        assert document.answer.endswith(END)
        assert document.answer.count(END) == 1
        assert len(document.answer) > len(END) + 5


def test_documents_depend_on_the_seed_alone(files: list[SourceFile]) -> None:
    made = []
    for seed in (5, 5, 6):
        maker, rng = DocumentMaker(files, ["alpha"]), random.Random(seed)
        made.append([maker.make(rng, 900) for _ in range(20)])
    assert made[0] == made[1] != made[2]


def test_parse_function_refuses_what_is_not_one_function() -> None:
    assert parse_function("x = 1") is None
    assert parse_function("def f(:") is None
    function = parse_function("async def f(a, *b, c=1, **d):\n    return a")
    assert function is not None
    assert function.parameters == ["a", "*b", "c", "**d"]


# --- tokenizer and shipped files ------------------------------------------------------------


@given(st.text())
def test_tokenizer_is_lossless(text: str) -> None:
    tokenizer = load_tokenizer(WEIGHTS)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_indentation_costs_one_token() -> None:
    tokenizer = load_tokenizer(WEIGHTS)
    flat = len(tokenizer.encode(" return self").ids)
    assert len(tokenizer.encode("\n            return self").ids) == flat + 1


def test_special_tokens_have_the_ids_that_the_files_name() -> None:
    tokenizer = load_tokenizer(WEIGHTS)
    config = json.loads((WEIGHTS / "config.json").read_text())
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert config["eos_token_id"] == tokenizer.token_to_id(END)
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    settings_ = json.loads((WEIGHTS / "tokenizer_config.json").read_text())
    assert settings_["chat_template"] == CHAT_TEMPLATE
    assert settings_["eos_token"] == END


ROLES = st.sampled_from(("system", "user", "assistant"))
TURNS = st.lists(st.tuples(ROLES, st.text()), max_size=4)


@given(TURNS, st.booleans())
@settings(max_examples=50)
def test_chat_template_equals_its_readable_twin(turns: list, generate: bool) -> None:
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    messages = [{"role": role, "content": text} for role, text in turns]
    rendered = template.render(messages=messages, add_generation_prompt=generate)
    assert rendered == render_turns(turns, generate)


def test_chat_template_takes_content_parts() -> None:
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    rendered = template.render(messages=[{"role": "user", "content": parts}])
    assert rendered == "<|user|>Helloyou"


def test_shipped_files_are_small_and_whole() -> None:
    folder = tiny_model.model_path()
    shapes = json.loads((folder / "config.json").read_text())
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    hidden = shapes["hidden_size"]
    assert header["model.embed_tokens.weight"]["shape"] == [shapes["vocab_size"], hidden]
    assert len(header) == 9 * shapes["num_hidden_layers"] + 2
    assert (folder / "README.md").read_text().startswith("---")
    sizes = [path.stat().st_size for path in folder.parent.glob("weights*/*")]
    assert sum(sizes) <= 16_000_000
    for drafter in (tiny_model.eagle_path(), tiny_model.draft_model_path()):
        assert sum(path.stat().st_size for path in drafter.iterdir()) < 3_000_000
        assert (drafter / "README.md").read_text().startswith("---")


def test_missing_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny_model, "_HERE", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"weights-medusa.config\.json is missing"):
        tiny_model.medusa_path()
    with pytest.raises(FileNotFoundError, match=r"tiny_model\.train"):
        tiny_model.model_path()


# --- model, optimizer, training -------------------------------------------------------------

torch = pytest.importorskip("torch", reason="the training code needs torch")


@pytest.fixture(scope="module")
def small_model():
    model_module = importlib.import_module("tools.tiny_model.model")
    torch.manual_seed(0)
    config = model_module.ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=2, head_size=8, intermediate_size=48
    )
    model = model_module.TinyLlama(config)
    for parameter in model.parameters():  # output matrices start at 0, which would hide errors
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_attention_in_chunks_equals_torch() -> None:
    from tools.tiny_model.model import causal_attention

    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 300, 8) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(causal_attention(query, key, value), expected)
    tail = causal_attention(query[:, :, 290:], key, value, start=290)
    torch.testing.assert_close(tail, expected[:, :, 290:])


def test_greedy_with_cache_equals_full_forward(small_model) -> None:
    from tools.tiny_model.decoding import greedy

    prompt = [3, 9, 27, 17]
    output = greedy(small_model, [prompt, prompt[::-1]], 12, eos=None)[0]
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = small_model.logits(small_model.hidden(ids, *small_model.rotary(ids.shape[1])))
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == output


def test_orthogonalize_evens_out_singular_values() -> None:
    from tools.tiny_model.optimizer import orthogonalize

    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 16, 40)))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_induction_heads_copy_before_any_training() -> None:
    from tools.tiny_model.induction import set_induction_heads
    from tools.tiny_model.model import ModelConfig, TinyLlama

    torch.manual_seed(0)
    model = TinyLlama(ModelConfig(num_layers=2))
    ids = torch.randperm(2000)[:40].repeat(2)[None] + 4
    ranks = []
    for strength in (0.0, 2.0):
        set_induction_heads(model, strength)
        with torch.no_grad():
            logits = model.logits(model.hidden(ids, *model.rotary(80)))[0, 45:79]
        right = logits.gather(1, ids[0, 46:80, None])
        ranks.append(float((logits > right).sum(1).float().mean()))
    assert ranks[1] < 0.5 * ranks[0]


def tiny_dataset():
    from tools.tiny_model.data.dataset import Dataset, Ragged

    rng = np.random.default_rng(0)

    def ragged(count: int) -> Ragged:
        pairs = [(rng.integers(4, 64, 10), [*rng.integers(4, 64, 9), 0]) for _ in range(count)]
        return Ragged.of(pairs)

    plain = rng.integers(4, 64, 9000).astype(np.uint16)
    return Dataset(plain, *(ragged(30) for _ in range(4)), plain[:3000], ragged(8))


def test_rows_are_full_and_weigh_prompts_less(tmp_path: Path) -> None:
    from tools.tiny_model.data.dataset import PROMPT_WEIGHT, Dataset, RowFeed

    data = tiny_dataset()
    data.save(tmp_path / "data.npz")
    again = Dataset.load(tmp_path / "data.npz")
    feed, same = RowFeed(data, seed=1), RowFeed(again, seed=1)
    for _ in range(10):
        ids, targets, weights = feed.batch(2, 128)
        assert ids.shape == targets.shape == weights.shape == (2, 128)
        assert (ids[:, 1:] == targets[:, :-1]).all()
        assert set(np.unique(weights)) <= {np.float32(PROMPT_WEIGHT), np.float32(1.0)}
        np.testing.assert_array_equal(same.batch(2, 128)[0], ids)


def test_training_resumes_where_it_was(tmp_path: Path) -> None:
    from tools.tiny_model.model import ModelConfig, TinyLlama, load_model
    from tools.tiny_model.train import TrainConfig, Trainer, export

    def trainer():
        torch.manual_seed(0)
        shape = ModelConfig(
            vocab_size=64, hidden_size=32, num_layers=2, head_size=8, intermediate_size=48
        )
        config = TrainConfig(steps=4, batch_tokens=128, stages=((0.5, 64), (1.0, 128)))
        return Trainer(TinyLlama(shape), tiny_dataset(), config)

    straight, broken = trainer(), trainer()
    for _ in range(2):
        straight.run_step(straight.model)
        broken.run_step(broken.model)
    torch.save(broken.state(), tmp_path / "state.pt")
    resumed = trainer()
    resumed.resume(torch.load(tmp_path / "state.pt", weights_only=False))
    for training in (straight, resumed):
        training.run_step(training.model)
        training.run_step(training.model)
        assert training.progress == 1.0
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    export(resumed, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    torch.testing.assert_close(
        loaded.embed_tokens, resumed.model.embed_tokens.detach().bfloat16().float()
    )
    assert json.loads((tmp_path / "model" / "training.json").read_text())["steps"] == 4


# --- measures -------------------------------------------------------------------------------


def test_find_loop_needs_three_copies() -> None:
    from tools.tiny_model.decoding import find_loop, looping_positions

    span = list(range(10, 20))
    assert find_loop([1, 2, *span, *span, 3]) is None
    assert find_loop([1, 2, *span, *span, *span, 3]) == (22, 10)
    assert find_loop([5] * 17) is None
    assert find_loop([5] * 18) == (2, 1)
    assert looping_positions([1, *span, *span, *span]) == list(range(21, 31))


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4))
def test_looping_positions_equal_the_plain_definition(tokens: list[int], least: int) -> None:
    from tools.tiny_model.decoding import looping_positions

    expected = set()
    for period in range(1, len(tokens) // 3 + 1):
        for start in range(len(tokens)):
            for end in range(start + max(3 * period, 6 * least), len(tokens) + 1):
                same = all(tokens[i] == tokens[i - period] for i in range(start + period, end))
                if same:
                    expected |= set(range(start + 2 * period, end))
    assert looping_positions(tokens, min_tokens=6 * least) == sorted(expected)


def test_ngram_drafter_counts_steps() -> None:
    from tools.tiny_model.decoding import ngram_steps

    prompt = list(range(100, 120))
    copied = ngram_steps([*prompt, 100, 101], prompt[2:])
    assert copied.steps == 2  # eight drafted and one more, twice
    fresh = ngram_steps(prompt, list(range(30)))
    assert fresh.tokens_per_step == 1.0
