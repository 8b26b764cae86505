"""Tokens per step of the first requests after a restart, with and without a warm start.

An engine answers recorded questions, ends, and leaves a store file. The next one answers the
requests that come first: new questions, of the same categories, or questions of which some were
asked before. It starts cold, or reads the file. Drafts are verified with the recorded answers, as
in replay.py. The stall of a step by a save is measured too: the snapshot's time, and the time that
drafting takes while a thread writes the file.

    python benchmarks/warm_start.py --questions question.jsonl --answers vicuna-7b.jsonl
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from replay import replay
from support.harness import Row, print_table, write_json
from support.replay_data import (
    DEFAULT_TOKENIZER,
    AnswersFile,
    QuestionsFile,
    Recording,
    RowsFile,
    TokenizerName,
    load_tokenizer,
    read_recordings,
)
from support.replay_methods import OwnDrafter, Setting

from vllm_trie.store import StoreHeader, read_store, write_store

NODES = 32
STORE_TOKENS = 262_144
"""Of the store that is written: the default of `store_tokens`."""
SHARES = (0.0, 0.25, 1.0)
"""Shares of the first requests that were asked before the restart."""


def tokens_per_step(drafter: OwnDrafter, requests: list[Recording]) -> float:
    """Answer the requests in order; return their tokens over their steps."""
    steps = [step for i, asked in enumerate(requests) for step in replay(drafter, f"r{i}", asked)]
    return sum(step.num_tokens for step in steps) / len(steps)


def answer(drafter: OwnDrafter, requests: list[Recording]) -> None:
    """Let the drafter see the requests' ends only: nothing of it depends on the steps."""
    for i, request in enumerate(requests):
        tokens = np.array(request.prompt + request.output, dtype=np.int32)
        drafter.draft(f"a{i}", tokens, len(request.prompt))
        drafter.finish(f"a{i}", tokens, len(request.prompt))


def measure_stall(drafter: OwnDrafter, path: Path, header: StoreHeader, one: Recording) -> Row:
    """Return milliseconds: of a snapshot, of a write, and of drafting next to a write and alone."""
    begin = time.perf_counter()
    texts = drafter.drafter.save()
    row: Row = {"snapshot_ms": 1e3 * (time.perf_counter() - begin)}
    texts = list(texts) * (STORE_TOKENS // sum(len(text.token_ids) for text in texts))
    row["texts"] = len(texts)
    begin = time.perf_counter()
    write_store(path, header, texts)
    row["write_ms"] = 1e3 * (time.perf_counter() - begin)
    row["bytes"] = path.stat().st_size
    tokens = np.array(one.prompt + one.output, dtype=np.int32)
    for name, is_writing in (("alone", False), ("next_to_a_write", True)):
        stop = threading.Event()

        def write(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                write_store(path, header, texts)

        thread = threading.Thread(target=write)
        if is_writing:
            thread.start()
        took = []
        for end in range(len(one.prompt) + 1, len(tokens)):
            begin = time.perf_counter()
            drafter.draft(name, tokens[:end], len(one.prompt))
            took.append(1e3 * (time.perf_counter() - begin))
        stop.set()
        if is_writing:
            thread.join()
        row[f"draft_ms_{name}"] = statistics.median(took)
        row[f"draft_ms_{name}_worst"] = max(took)
    return row


def main(
    questions: QuestionsFile,
    answers: AnswersFile,
    tokenizer: TokenizerName = DEFAULT_TOKENIZER,
    first: Annotated[int, typer.Option(help="Requests after the restart.")] = 20,
    repeats: Annotated[int, typer.Option(help="Choices of those requests.")] = 5,
    json_out: RowsFile = None,
) -> None:
    """Replay recorded answers around a restart."""
    encoder = load_tokenizer(tokenizer)
    recordings = list(read_recordings(questions, answers, encoder))
    header = StoreHeader(
        model="replay", tokenizer="", vocab_size=encoder.vocab_size, saved_at=time.time()
    )

    def new_drafter() -> OwnDrafter:
        return OwnDrafter("ngram_trie", Setting(NODES, encoder.vocab_size))

    rates_of: dict[tuple[float, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay.store"
        for repeat in range(repeats):
            rng = random.Random(repeat)
            # Whole questions: a later turn repeats the earlier ones.
            numbers = sorted({recording.question_id for recording in recordings})
            held_out = set(rng.sample(numbers, first))
            new = [one for one in recordings if one.question_id in held_out][:first]
            seen = [recording for recording in recordings if recording.question_id not in held_out]
            rng.shuffle(seen)
            before = new_drafter()
            answer(before, seen)
            write_store(path, header, before.drafter.save())
            for share in SHARES:
                repeated = round(share * first)
                requests = [*seen[:repeated], *new[repeated:]]
                rng.shuffle(requests)
                for state in ("cold", "warm"):
                    drafter = new_drafter()
                    if state == "warm":
                        drafter.drafter.restore(read_store(path).texts)
                    rate = tokens_per_step(drafter, requests)
                    rates_of.setdefault((share, state), []).append(rate)
        stall = measure_stall(before, path, header, recordings[0])
    rows: list[Row] = [
        {"asked_before": share, "start": state, "tokens_per_step": statistics.fmean(rates)}
        for (share, state), rates in rates_of.items()
    ]
    lines = [[f"{r['asked_before']:.0%}", r["start"], r["tokens_per_step"]] for r in rows]
    print_table(("asked before", "start", "tokens per step"), lines)
    print_table(("saving", "value"), [[name, value] for name, value in stall.items()])
    write_json([*rows, stall], json_out)


if __name__ == "__main__":
    typer.run(main)
