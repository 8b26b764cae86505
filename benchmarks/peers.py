"""Plain vLLM, its own drafters and this project's side by side: one command, one run.

Workloads:

    chat     a real model's own answers: first turns of Spec-Bench's questions as chats of
             SmolLM2-135M-Instruct, which is fetched on first use, or of `--model`, without
             a prefix cache. Without `--questions` or SPEC_BENCH_QUESTIONS, the demo's prompts take
             their place
    shipped  the demo's prompts on the model that ships with the project, or on `--model`
    replay   recorded answers of Spec-Bench on a replay model, which has the compute of a real shape
             with dummy weights and whose greedy output is the recorded answer: a real model's text
             at a real step's cost on the real engine. Needs the two files of Spec-Bench, by option
             or by the environment variables SPEC_BENCH_QUESTIONS and SPEC_BENCH_ANSWERS, and is
             left out without them

Requests run one at a time, greedily. Every method answers a question before the next one comes.
With `--at-once 8 32` they run together as well: all questions are one load, in random order, and
the next one begins when another has ended. A load is a category of its own. The engines advance in
it by turns of a second, because slow spells of a shared machine last longer than that.
Drafters that learn from finished requests begin each repeat and each load empty. Engines are
compiled, vLLM's default. `tokens_per_s` is output over the whole time of the requests, prefill
included. `ms_per_output_token` and `decode_ratio_to_plain` count the time after the first token
only. `tokens_per_step` is tokens after the first one over their steps. In bfloat16 near-ties make
free answers differ: `identical_share` is the share of answers that do not, and ratios to plain are
of times per token.

    python benchmarks/peers.py --workload chat --questions question.jsonl
    python benchmarks/peers.py --questions question.jsonl --answers vicuna-7b.jsonl \
        --json peers.json
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress
from support.device import add_device_options, check_device, engine_options
from support.harness import Row, add_model_option, option_parser, report
from support.peers_engines import (
    DEFAULT_METHODS,
    METHODS,
    MOST_NODES,
    PLAIN,
    Contestant,
    Load,
    Measured,
    Question,
    answer,
    available,
    replay_settings,
    replaying,
    run_in_turns,
)
from support.peers_rows import MEAN, print_breakdown, summarize, with_means
from support.replay_data import (
    ANSWERS_VARIABLE,
    DEFAULT_TOKENIZER,
    QUESTIONS_VARIABLE,
    SMOKE_FILES,
    add_file_option,
    choose,
    load_tokenizer,
    read_recordings,
)

from vllm_trie.lab import local_engine, smollm2

WORKLOADS = ("chat", "shipped", "replay")
SHAPES = ("tiny", "0.4b", "8b")
SERVED = 256
"""Most requests of an engine on a GPU, as of a server: the node budget's first costs go by it."""
COLUMNS = (
    "method", "workload", "category", "tokens_per_s", "ratio_to_plain", "decode_ratio_to_plain",
    "ms_per_output_token", "tokens_per_step", "identical", "identical_share",
)  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or `arguments`."""
    smoke = {**SMOKE_FILES, "shape": "tiny", "max_tokens": 8, "questions_per_category": 1}
    smoke |= {"workload": ["shipped"], "methods": [PLAIN, "ngram_trie"], "eager": True}
    parser = option_parser(__doc__, repeats=1, smoke=smoke)
    add_device_options(parser)
    add_model_option(parser, "of the workloads chat and shipped, in place of theirs")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(DEFAULT_METHODS))
    parser.add_argument(
        "--variant",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "JSON"),
        help="adds ngram_trie with other options as a method, such as "
        """corpus '{"corpus": "FILE"}'; "prepare": false is for this benchmark""",
    )
    add_file_option(parser, "--questions")
    add_file_option(parser, "--answers")
    parser.add_argument("--tokenizer", default=DEFAULT_TOKENIZER, help="of the recorded text")
    parser.add_argument("--categories", nargs="+", help="of Spec-Bench; all if left out")
    parser.add_argument(
        "--questions-per-category", type=int, default=6, help="spread over the file"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="longest output")
    parser.add_argument(
        "--at-once", nargs="+", type=int, default=[1], help="requests that run at a time"
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.4b", help="of the replay model")
    parser.add_argument("--dtype", default="bfloat16", help="of the workloads chat and replay")
    parser.add_argument("--eager", action="store_true", help="run the model without compilation")
    parser.add_argument(
        "--rows",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="measure nothing and join the rows of earlier runs, of different categories or "
        "workloads",
    )
    options = parser.parse_args(arguments)
    for name, changes in options.variant:
        METHODS[name] = {**METHODS["ngram_trie"], **json.loads(changes)}
        options.methods.append(name)
    return options


def main() -> None:
    """Measure, print, write."""
    print_breakdown(report(all_rows, parse(), COLUMNS))


def all_rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows of earlier runs, or of the workloads."""
    if options.rows:
        rows = [row for path in options.rows for row in json.loads(path.read_text())]
        return with_means([row for row in rows if row["category"] != MEAN])
    return run_apart(options) if len(options.workload) > 1 else run(options)


def run_apart(options: argparse.Namespace) -> list[Row]:
    """Run each workload in its own process, as they need different numbers of threads."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for workload in options.workload:
            out = Path(folder) / f"{workload}.json"
            command = [sys.executable, *sys.argv]
            command += ["--workload", workload, "--json", str(out)]
            subprocess.run(command, check=True)
            rows += json.loads(out.read_text())
    return rows


def run(options: argparse.Namespace) -> list[Row]:
    """Return the rows of one workload."""
    [workload] = options.workload
    if workload == "replay":
        if options.questions is None or options.answers is None:
            print(
                "the workload replay is left out: it needs --questions and --answers, or the "
                f"environment variables {QUESTIONS_VARIABLE} and {ANSWERS_VARIABLE}"
            )
            return []
        local_engine.set_environment(options.verbose, local_engine.with_all_cores())
        return run_replay(options)
    if workload == "chat":
        local_engine.set_environment(options.verbose, local_engine.with_all_cores())
        return run_chat(options)
    local_engine.set_environment(options.verbose)
    return run_shipped(options)


def run_chat(options: argparse.Namespace) -> list[Row]:
    """Measure chats on a real model, whose answers are free."""
    from support.prompts import demo_chats, spec_bench_chats

    check_device(options.device)
    model = options.model or smollm2.model_folder(smollm2.NAME)
    if options.questions is None:
        prompts = list(demo_chats(model).items())
    else:
        chats = spec_bench_chats(model, options.questions)
        chosen = choose(chats, options.questions_per_category, options.categories)
        prompts = [(chat.category, chat.prompt) for chat in chosen]
    questions = [
        Question(category, prompt, None, options.max_tokens) for category, prompt in prompts
    ]
    settings = {**engine_options(options), "dtype": options.dtype, "enable_prefix_caching": False}
    return measure(options, "chat", model, questions, settings)


def run_shipped(options: argparse.Namespace) -> list[Row]:
    """Measure the demo's prompts on the shipped model."""
    from support.prompts import demo_chats

    from vllm_trie.lab.tiny_model import model_path

    check_device(options.device)
    model = options.model or str(model_path())
    questions = [
        Question(name, prompt, None, options.max_tokens)
        for name, prompt in demo_chats(model).items()
    ]
    return measure(options, "shipped", model, questions, engine_options(options))


def run_replay(options: argparse.Namespace) -> list[Row]:
    """Measure recorded answers on a replay model."""
    check_device(options.device)
    encoder = load_tokenizer(options.tokenizer)
    recordings = read_recordings(options.questions, options.answers, encoder)
    chosen = choose(list(recordings), options.questions_per_category, options.categories)
    questions = [
        Question(
            recording.category,
            recording.prompt,
            recording.output,
            min(len(recording.output), options.max_tokens),
        )
        for recording in chosen
    ]
    settings = {**engine_options(options), **replay_settings(options.dtype)}
    with replaying(options.shape, encoder.vocab_size) as model:
        return measure(options, "replay", model, questions, settings)


def measure(
    options: argparse.Namespace,
    workload: str,
    model: str,
    questions: Sequence[Question],
    settings: dict[str, Any],
) -> list[Row]:
    """Start all engines, ask them all questions, and return the rows."""
    methods = available(options.methods)
    longest = max(len(question.prompt) + question.max_tokens for question in questions)
    length, most = local_engine.room_for(longest, 0, MOST_NODES), max(options.at_once)
    settings |= {"max_model_len": length, "max_num_seqs": most, "enforce_eager": options.eager}
    if options.device == "cuda":
        size = local_engine.kv_cache_bytes(model, length, most, settings["dtype"])
        settings |= {"max_num_seqs": SERVED, "kv_cache_memory_bytes": size}
    works: list[Question | Load] = []
    for at_once in options.at_once:
        works += questions if at_once == 1 else [together(questions, at_once)]
    prepare = play_answers if workload == "replay" else lambda work: None
    with Progress(transient=True) as progress:
        starting = progress.add_task("engines", total=len(methods))
        contestants: list[Contestant] = []
        for method in methods:
            with local_engine.silence(not options.verbose):
                contestants.append(Contestant(method, model, **settings))
            progress.advance(starting)
        warm_up(contestants, works[-1], prepare)
        asking = progress.add_task(workload, total=options.repeats * len(works))
        measurements: dict[tuple[int, str], list[Measured]] = defaultdict(list)
        for index, method, measured in run_in_turns(
            contestants, works, options.repeats, prepare, lambda: progress.advance(asking)
        ):
            measurements[index, method].append(measured)
    return with_means(summarize(workload, methods, works, measurements))


def together(questions: Sequence[Question], at_once: int) -> Load:
    """Return all questions as one load, the categories mixed."""
    mixed = random.Random(0).sample(questions, len(questions))
    return Load(f"{at_once} at once", mixed, at_once)


def play_answers(work: Question | Load) -> None:
    """Make the recorded answers the outputs of all replay models."""
    from support.replay_model import Recorded

    questions = [work] if isinstance(work, Question) else work.questions
    Recorded.play([[*question.prompt, *(question.answer or ())] for question in questions])


def warm_up(contestants: Sequence[Any], work: Question | Load, prepare: Any) -> None:
    """Run a part of a question or load on every engine, which forgets it before it is measured."""

    def short(question: Question) -> Question:
        return question._replace(max_tokens=min(question.max_tokens, 32))

    part: Question | Load = (
        short(work)
        if isinstance(work, Question)
        else work._replace(questions=list(map(short, work.questions[: work.at_once])))
    )
    prepare(part)
    for _ in answer(contestants, part):
        pass


if __name__ == "__main__":
    main()
