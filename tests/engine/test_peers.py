"""The replay model gives the recorded answers under every method, and the table has its keys."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import peers
import pytest
from support import peers_engines

from vllm_trie.lab.tiny_model import model_path

PINNED = {"method", "workload", "category", "tokens_per_s", "tokens_per_step", "ratio_to_plain"}
FIXED = "ngram_trie_fixed_8"
"""The tests count its drafts: what the adaptive budget drafts depends on measured times."""
METHODS = ["plain", "ngram", FIXED]


def write_recordings(folder: Path) -> list[str]:
    """Answers that repeat parts of their questions, and new words in between."""
    rng = random.Random(3)
    words = [f"{a}{b}" for a in ("river", "cloud", "ember") for b in ("stone", "lantern", "side")]
    questions, answers = [], []
    for number, category in enumerate(("writing", "qa", "rag")):
        text = " ".join(rng.choices(words, k=60))
        turns = [f"Repeat: {text}", "Again."][: 2 if category == "writing" else 1]
        answer = [" ".join(rng.choices(words, k=12)) + ". " + text[: 200 + 30 * number]] * len(
            turns
        )
        questions.append({"question_id": number, "category": category, "turns": turns})
        answers.append({"question_id": number, "choices": [{"turns": answer}]})
    paths = folder / "questions.jsonl", folder / "answers.jsonl"
    for path, lines in zip(paths, (questions, answers), strict=True):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--questions", str(paths[0]), "--answers", str(paths[1])]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    files = write_recordings(tmp_path_factory.mktemp("recordings"))
    options = ["--workload", "replay", "--shape", "tiny", "--eager", "--max-tokens", "80"]
    options += ["--at-once", "1", "2", "--methods", *METHODS]
    return peers.run(peers.parse([*options, *files]))


def test_all_methods_give_the_recorded_answers(rows):
    assert {row["method"] for row in rows} == set(METHODS)
    assert {row["category"] for row in rows} == {"multi-turn", "qa", "rag", "2 at once", "mean"}
    assert all(row["identical"] is True for row in rows)


def test_rows_have_the_pinned_keys_and_plausible_values(rows):
    by_method: dict[str, dict[str, Any]] = {}
    for row in rows:
        assert set(row) >= PINNED
        assert row["workload"] == "replay"
        assert row["tokens_per_s"] > 0
        assert row["ratio_to_plain"] > 0
        if row["category"] == "mean":
            by_method[row["method"]] = row
    assert by_method["plain"]["tokens_per_step"] == 1
    assert by_method["plain"]["ratio_to_plain"] == 1
    assert by_method["plain"]["nodes_per_step"] == 0
    # The answers are in the prompts: drafts succeed, and a tree has to be verified for it.
    assert by_method["ngram"]["tokens_per_step"] > 1.5
    assert by_method[FIXED]["tokens_per_step"] > 1.5
    assert by_method[FIXED]["nodes_per_step"] > 1


def test_chats_have_free_answers(tmp_path):
    options = ["--workload", "chat", "--model", str(model_path()), "--dtype", "float32", "--eager"]
    options += ["--max-tokens", "24", "--methods", "plain", FIXED]
    rows = peers.run(peers.parse([*options, *write_recordings(tmp_path)]))
    assert {row["category"] for row in rows} == {"multi-turn", "qa", "rag", "mean"}
    for row in rows:
        assert set(row) >= PINNED | {"decode_ratio_to_plain"}
        assert row["workload"] == "chat"
        assert (row["identical"], row["identical_share"]) == (True, 1.0)
    drafting = [row for row in rows if row["method"] == FIXED and row["category"] == "mean"]
    assert drafting[0]["nodes_per_step"] > 1


@pytest.fixture
def learner(tmp_path):
    """Ask one and the same question of an engine whose drafter learns from finished requests."""
    rng = random.Random(5)
    prompt, answer = ([rng.randrange(10, 30_000) for _ in range(n)] for n in (20, 60))
    question = peers_engines.Question("any", prompt, answer, len(answer))
    with peers_engines.replaying("tiny", 32_000, 512) as model:
        contestant = peers_engines.Contestant(
            FIXED,
            model,
            max_model_len=256,
            enforce_eager=True,
            **peers_engines.replay_settings("bfloat16"),
        )
        peers.play_answers(question)

        def ask(forget: bool = False) -> peers_engines.Measured:
            if forget:
                contestant.forget()
            return contestant.run(question)

        yield ask


def test_engines_learn_and_forget(learner):
    first, second, third = learner(), learner(), learner(forget=True)
    assert first.steps == 59, "random text cannot be guessed"
    assert second.steps < 30, "the answer was seen a moment ago"
    assert third.steps == 59, "the engine forgot"
    assert first.output == second.output == third.output
