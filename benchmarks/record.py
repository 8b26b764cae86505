"""A model's greedy answers to a file of questions, as the replays read them.

Each line of the questions has `question_id`, `category` and `turns`, as Spec-Bench's do; a later
turn follows the model's answers to the earlier ones, by its chat template. The engine is plain
vLLM's, in `--dtype`. Lines are written batch by batch.

    python benchmarks/record.py --model smollm2 --questions question.jsonl --out SMOLLM2.jsonl
    python benchmarks/replay.py --questions question.jsonl --answers SMOLLM2.jsonl \
        --tokenizer "$(vllm-trie fetch-model)"
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.harness import Row, add_model_option, option_parser, report_quietly
from support.replay_data import SMOKE_FILES, category_of, read_lines

from vllm_trie.lab import local_engine

COLUMNS = ("category", "questions", "tokens")


def main() -> None:
    """Record, and print how much."""
    smoke = {"questions": SMOKE_FILES["questions"], "out": Path("/dev/null"), "max_tokens": 8}
    parser = option_parser(__doc__, smoke=smoke)
    add_model_option(parser, "a chat model; the shipped one if left out")
    parser.add_argument("--questions", type=Path, help="JSONL")
    parser.add_argument("--out", type=Path, help="file of the answers, JSONL")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer")
    parser.add_argument("--batch-size", type=int, default=8, help="questions at a time")
    options = parser.parse_args()
    if options.questions is None or options.out is None:
        parser.error("--questions and --out are needed")
    report_quietly(run, options, COLUMNS)


def run(options: argparse.Namespace) -> list[Row]:
    """Answer all questions; return a row for each category."""
    from vllm_trie.lab.tiny_model import model_path

    model = options.model or str(model_path())
    questions = list(read_lines(options.questions))
    tokenizer = local_engine.load_tokenizer(model)
    llm = local_engine.start_engine(
        model,
        max_model_len=max(
            len(tokenizer.encode("".join(question["turns"])))
            + len(question["turns"]) * (options.max_tokens + 64)  # of the chat template
            for question in questions
        ),
        max_num_seqs=options.batch_size,
        dtype=options.dtype,
    )
    rows: dict[str, Row] = {}
    with options.out.open("w", encoding="utf-8") as file:
        for batch in local_engine.batches(questions, options.batch_size):
            tokens = answer(llm, batch, options.max_tokens)
            for question, turns in zip(batch, tokens, strict=True):
                texts = tokenizer.batch_decode(turns, skip_special_tokens=True)
                line = {"question_id": question["question_id"], "choices": [{"turns": texts}]}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                category = category_of(question)
                row = rows.setdefault(category, {"category": category, "questions": 0, "tokens": 0})
                row["questions"] += 1
                row["tokens"] += sum(map(len, turns))
            file.flush()
    return list(rows.values())


def answer(llm: Any, questions: Sequence[dict], max_tokens: int) -> list[list[list[int]]]:
    """Return the output tokens of each turn of each question."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    chats: list[list[dict[str, str]]] = [[] for _ in questions]
    outputs: list[list[list[int]]] = [[] for _ in questions]
    for turn in range(max(len(question["turns"]) for question in questions)):
        asked = [i for i, question in enumerate(questions) if turn < len(question["turns"])]
        for i in asked:
            chats[i].append({"role": "user", "content": questions[i]["turns"][turn]})
        results = llm.chat([chats[i] for i in asked], params, use_tqdm=False)
        for i, result in zip(asked, results, strict=True):
            chats[i].append({"role": "assistant", "content": result.outputs[0].text})
            outputs[i].append(list(result.outputs[0].token_ids))
    return outputs


if __name__ == "__main__":
    main()
