"""Training of heads, on a stand-in for the model."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from vllm_trie.extras.heads.heads import HeadsShape
from vllm_trie.extras.heads.training import (
    Encoder,
    TokenRows,
    Trainer,
    TrainingPlan,
    command,
    read_tokens,
)
from vllm_trie.extras.heads.training.states import StateCache
from vllm_trie.extras.heads.training.text import find_files, split_rows

HIDDEN, VOCAB, LENGTH = 32, 24, 16
SHAPE = HeadsShape(2, 1, HIDDEN, VOCAB, VOCAB)


class CountingModel:
    """Its hidden state is the token's embedding; it counts upwards in steps of one."""

    device = torch.device("cpu")
    path = "counting"
    hidden_size, vocab_size = HIDDEN, VOCAB
    encoder = Encoder(lambda text: [ord(c) % VOCAB for c in text], lambda text: [1], None, VOCAB)

    def __init__(self) -> None:
        self.passes = 0
        generator = torch.Generator().manual_seed(0)
        self._embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.output_weight = self._embedding.roll(1, 0)

    def hidden_states(self, token_ids):
        self.passes += 1
        return self._embedding[token_ids]

    def predictions(self, hidden):
        return (hidden @ self.output_weight.T).argmax(-1)


def counting_rows(count: int = 64) -> np.ndarray:
    starts = np.random.default_rng(0).integers(0, VOCAB, count)
    return ((starts[:, None] + np.arange(LENGTH)) % VOCAB).astype(np.int32)


def make_trainer(shape: HeadsShape = SHAPE, rows=None, steps: int = 60) -> Trainer:
    torch.manual_seed(0)
    plan = TrainingPlan(steps=steps, batch_rows=4, learning_rate=2e-2, warmup_steps=5)
    rows = counting_rows() if rows is None else rows
    return Trainer(CountingModel(), TokenRows(rows.ravel(), rows.shape[1]), plan, shape)


def run(trainer: Trainer, until: int) -> None:
    while trainer.step < until:
        trainer.run_step()


def test_heads_learn_their_own_distance():
    trainer = make_trainer()
    before = trainer.evaluate(counting_rows(8))
    run(trainer, 60)
    after = trainer.evaluate(counting_rows(8))
    assert all(score.top1 < 0.5 for score in before)
    assert all(score.top1 > 0.95 and score.nll < 0.5 for score in after)
    # Head k says the token k + 2 places on: after token 3 come 4 (the model's), then 5 and 6.
    logits = trainer.heads(trainer.backbone.hidden_states(torch.tensor([3])))[:, 0]
    assert logits.argmax(-1).tolist() == [5, 6]


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path):
    whole = make_trainer(steps=12)
    run(whole, 12)
    interrupted = make_trainer(steps=12)
    run(interrupted, 5)
    torch.save(interrupted.state(), tmp_path / "state.pt")
    resumed = make_trainer(steps=12)
    resumed.resume(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.step == 5
    run(resumed, 12)
    for mine, theirs in zip(resumed.heads.parameters(), whole.heads.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_resuming_something_else_is_refused():
    state = make_trainer(steps=12).state()
    with pytest.raises(ValueError, match=r"steps=20 \(before: 12\)"):
        make_trainer(steps=20).resume(state)
    other = make_trainer(HeadsShape(3, 1, HIDDEN, VOCAB, VOCAB), steps=12)
    with pytest.raises(ValueError, match="another shape"):
        other.resume(state)
    with pytest.raises(ValueError, match=r"settings: text='\w+' \(before: '\w+'\); give the same"):
        make_trainer(rows=counting_rows()[::-1], steps=12).resume(state)
    with pytest.raises(ValueError, match=rf"context={LENGTH // 2} \(before: {LENGTH}\)"):
        make_trainer(rows=counting_rows().reshape(-1, LENGTH // 2), steps=12).resume(state)
    state["settings"]["output_weight"] = "another"
    with pytest.raises(ValueError, match=r"settings: output_weight='\w+' \(before: 'another'\)"):
        make_trainer(steps=12).resume(state)


def test_heads_for_the_most_frequent_tokens():
    rows = counting_rows()
    rows[:48] %= 6
    trainer = make_trainer(HeadsShape(2, 1, HIDDEN, VOCAB, 6, shares_output=True), rows)
    assert trainer.heads.token_map.tolist() == list(range(6))
    run(trainer, 60)
    states = trainer.backbone.hidden_states(torch.tensor([0, 3]))
    outputs = trainer.heads(states).argmax(-1)
    assert outputs[0].tolist() == [2, 5]
    assert outputs[1, 0] == 3  # 6 has no output
    # A token that the map lacks counts as wrong.
    unlisted = np.arange(8, 16, dtype=np.int32)[None]
    assert all(score.top5 == 0 for score in trainer.evaluate(unlisted))


def test_questions_are_read_but_not_learned():
    trainer = make_trainer()
    rows = counting_rows(2)
    _, targets = trainer._inputs(rows)
    asked = rows.copy()
    asked[0, 3:7] = ~asked[0, 3:7]
    hidden, kept = trainer._inputs(asked)
    torch.testing.assert_close(
        hidden[:LENGTH], trainer.backbone.hidden_states(torch.tensor(rows[0]))
    )
    assert (kept[0] == -100).nonzero().flatten().tolist() == [2, 3, 4, 5]
    kept[0, 2:6] = targets[0, 2:6]
    torch.testing.assert_close(kept, targets)


def test_later_epochs_read_hidden_states_from_disk(tmp_path):
    rows = TokenRows(counting_rows(8).ravel(), LENGTH)
    plan = TrainingPlan(steps=12, batch_rows=4, learning_rate=2e-2, warmup_steps=5)
    trainers = []
    for folder in (None, tmp_path, tmp_path):
        torch.manual_seed(0)
        model = CountingModel()
        model._embedding = model._embedding.bfloat16().float()  # as the cache keeps them
        cache = folder and StateCache(folder, model, rows.rows)
        trainers.append(Trainer(model, rows, plan, SHAPE, cache))
    plain, first, later = trainers
    for trainer in trainers:
        run(trainer, 12)
    assert [trainer.backbone.passes for trainer in trainers] == [12, 2, 0]
    for trainer in (first, later):
        for mine, theirs in zip(plain.heads.parameters(), trainer.heads.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert len(list(tmp_path.iterdir())) == 2
    later._cache.delete()
    assert not list(tmp_path.iterdir())


def test_temperatures_lower_the_loss():
    trainer = make_trainer()
    run(trainer, 25)
    with torch.no_grad():
        trainer.heads.output_weight.mul_(3.0)  # far too sure of themselves
    rows = counting_rows(8)
    temperatures = trainer.fit_temperatures(rows)
    before = [score.nll for score in trainer.evaluate(rows)]
    with torch.no_grad():
        trainer.heads.output_weight.div_(torch.tensor(temperatures)[:, None, None])
    after = [score.nll for score in trainer.evaluate(rows)]
    assert all(a <= b + 1e-9 for a, b in zip(after, before, strict=True))
    assert any(abs(t - 1.0) > 0.05 for t in temperatures)


def test_text_files_and_token_files(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    lines = [{"text": "c"}, {"token_ids": [7, 8]}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")

    encoder = Encoder(lambda text: list(map(ord, text)), lambda text: [1, len(text)], 0, 9)
    tokens = read_tokens(find_files([tmp_path]), encoder)
    assert tokens.tolist() == [97, 98, 0, 99, 0, 7, 8, 0]
    answers = [{"settings": {}}, {"question": "abc", "token_ids": [7, 0]}]
    answers.append({"question": "", "text": "c"})
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, answers)))
    tokens = read_tokens([tmp_path / "b.jsonl"], encoder)
    assert tokens.tolist() == [~1, ~3, 7, 0, ~1, ~0, 99, 0]
    # JSON may have what Python takes for ends of lines, and users a key of the first line's name.
    mine = [{"text": "\u2028\x85", "settings": 1}, {"settings": 2, "text": "c"}]
    lines = [json.dumps(item, ensure_ascii=False) for item in mine]
    (tmp_path / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_tokens([tmp_path / "b.jsonl"], encoder).tolist() == [0x2028, 0x85, 0, 99, 0]
    for content, message in (
        (b"[]\n", r"line 1: expected"),
        (b'{"text": "a"}\n{"settings": {}}', r"line 2: expected"),
        (b'{"text": "a"}\n{"text": "\xff"}', r"line 2: expected"),
        (b'{"token_ids": [9]}', r"b\.jsonl, line 1: 'token_ids' must be .* in \[0, 9\)"),
        (b'\n{"token_ids": [-1]}', r"line 2: 'token_ids'"),
        (b'{"token_ids": 3}', r"line 1: 'token_ids'"),
        (b'{"token_ids": [1.5]}', r"line 1: 'token_ids'"),
    ):
        (tmp_path / "b.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_tokens(find_files([tmp_path]), encoder)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_files([tmp_path / "absent"])


def test_validation_rows_are_not_trained_on():
    train, held = split_rows(np.arange(100, dtype=np.int32), 10, 0.2)
    assert train.tolist() + held.tolist() == list(range(100))
    assert len(held) == 20
    with pytest.raises(ValueError, match="too few"):
        split_rows(np.arange(12, dtype=np.int32), 10, 0.2)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path, monkeypatch):
    """`vllm-trie medusa train` on the stand-in; returns its exit code and output."""
    monkeypatch.setattr(command, "_load_backbone", lambda *_: CountingModel())

    def run_command(data: Path, *options: str) -> tuple[int, str]:
        arguments = ["train", "--model", "counting", "--data", str(data)]
        arguments += ["--out", str(tmp_path / "out"), "--steps", "8", "--batch", "4"]
        result = CliRunner().invoke(command.app, [*arguments, "--context", str(LENGTH), *options])
        return result.exit_code, result.output.replace("\n", " ")

    return run_command


def write_data(path: Path, rows: np.ndarray) -> Path:
    path.write_text(json.dumps({"token_ids": rows.ravel().tolist()}))
    return path


def test_a_run_on_another_text_is_not_resumed(tmp_path, train):
    data = write_data(tmp_path / "a.jsonl", counting_rows())
    assert train(data, "--outputs", "20")[0] == 0
    code, said = train(data, "--outputs", "20")
    assert code == 0
    assert "resumed at step 8 of 8: nothing is left to train" in said
    other = write_data(tmp_path / "b.jsonl", counting_rows()[::-1])
    code, said = train(other, "--outputs", "20")
    assert code == 1
    assert f"{tmp_path / 'out' / command.STATE_FILE}: cannot resume with other" in said
    assert "or --no-resume" in said
    assert train(other, "--outputs", "20", "--no-resume")[0] == 0


def test_a_full_disk_does_not_end_the_training(tmp_path, train, monkeypatch):
    def allocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    data = write_data(tmp_path / "a.jsonl", counting_rows(16))
    assert "warning" not in train(data)[1]
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    code, said = train(data, "--no-resume")
    assert code == 0, said
    assert "cannot keep hidden states" in said
    assert "No space left" in said
    assert not list((tmp_path / "out").glob("*.cache"))


def test_the_cache_has_its_space_before_it_is_written_to(tmp_path):
    StateCache(tmp_path, CountingModel(), counting_rows(4096))
    for file in tmp_path.iterdir():
        assert file.stat().st_blocks * 512 >= file.stat().st_size >= 4096 * LENGTH * 4


def test_an_error_of_the_system_or_of_torch_has_no_traceback(tmp_path, train, monkeypatch):
    data = write_data(tmp_path / "a.jsonl", counting_rows())
    for error in (RuntimeError("out of memory"), PermissionError("not yours")):

        def load(*_: object, raised: Exception = error) -> None:
            raise raised

        monkeypatch.setattr(command, "_load_backbone", load)
        assert train(data) == (1, f"error: {error} ")
