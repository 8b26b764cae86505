"""Known futures: predicted outputs over edits, and forced tokens over JSON schemas.

Edits of generated files come in five kinds, each several times. In the set `seen` the prompt holds
the file, which is the prediction. In the set `unseen` it does not: the model writes a file, and the
prediction is its own text with an edit turned round. `prediction` and `wrong_prediction`, a text of
other tokens, run in the engine of the row `ngram_trie`.

Answers to 20 JSON schemas come in five forms. The prompt holds the schema or, in the sets `unseen`,
does not. The row `ngram_trie_unforced` is without the tokens that a grammar forces.

`--sets` selects kinds and forms. Rows of separate runs can be added up: they have tokens, steps and
seconds.

Times are of decoding: from the first token on. All methods decode a task one after the other, and
ratios are of sums over the tasks.

    python benchmarks/futures.py --model smollm2 --json futures.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from support.device import add_device_options, check_device, engine_options
from support.engines import keep_kernel_overrides
from support.futures_tasks import FORMS, KINDS, Edit, edits, schemas, undone
from support.harness import Row, add_model_option, option_parser, report_quietly
from support.peers_engines import METHODS, available

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "set", "tokens_per_step", "decode_ratio_to_plain", "cpu_ratio_to_plain", "identical",
    "tokens", "accepted_predicted", "rejected_predicted",
)  # fmt: skip
PLAIN, OURS = "plain", "ngram_trie"
PEERS = ("ngram", "suffix")


class Decoded(NamedTuple):
    """One answer."""

    tokens: list[int]
    steps: int
    """Behind the first token."""
    seconds: float
    """Of these steps."""
    cpu_seconds: float
    """Of the process meanwhile, which other work on the machine changes less."""
    predicted: tuple[int, int] = (0, 0)


class Contestant(NamedTuple):
    """A row: an engine, and what its requests have."""

    method: str
    llm: Any
    extra_args: dict[str, Any]
    drafts_forced_tokens: bool = True


def decode(llm: Any, prompt: Sequence[int], params: Any) -> Decoded:
    """Decode one prompt in an engine in this process, which shares nothing with earlier ones."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    params = params.clone()
    params.output_kind = RequestOutputKind.CUMULATIVE
    inputs = TokensPrompt(prompt_token_ids=list(prompt), cache_salt=str(time.perf_counter_ns()))
    engine.add_request("task", inputs, params)
    start, cpu_start, steps, output = 0.0, 0.0, 0, None
    while engine.has_unfinished_requests():
        for result in engine.step():
            output = result.outputs[0]
            steps += 1
            if steps == 1:
                start, cpu_start = time.perf_counter(), time.process_time()
    seconds = time.perf_counter() - start, time.process_time() - cpu_start
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    accepted, rejected = (getattr(output, name, 0) for name in names)
    assert output is not None
    return Decoded(list(output.token_ids), steps - 1, *seconds, (accepted, rejected))


def switch_forced_tokens(llm: Any, is_on: bool) -> None:
    """Let an engine draft what a grammar forces, or not."""
    from vllm_trie.drafts.engine.scheduler.next_drafts import next_drafts

    (forced_tokens,) = next_drafts(local_engine.scheduler_of(llm)).extensions
    forced_tokens.is_on = is_on


class Sums:
    """The rows of one set."""

    def __init__(self, name: str, options: Any, parts: Sequence[Sums] = ()) -> None:
        self._name = name
        self._repeats = options.repeats
        self._answers: dict[str, list[Decoded]] = {}
        for part in parts:
            for method, answers in part._answers.items():
                self._answers.setdefault(method, []).extend(answers)

    def compare(self, contestants: Sequence[Contestant], prompt: list[int], params: Any) -> None:
        """Decode a task with each contestant."""
        for contestant in [*contestants] * self._repeats:
            of_request = params.clone()
            if contestant.extra_args:
                of_request.extra_args = contestant.extra_args
            if contestant.method.startswith(OURS):
                switch_forced_tokens(contestant.llm, contestant.drafts_forced_tokens)
            answer = decode(contestant.llm, prompt, of_request)
            self._answers.setdefault(contestant.method, []).append(answer)

    def rows(self) -> list[Row]:
        plain = self._answers[PLAIN]
        rows = []
        for method, answers in self._answers.items():
            decoded = sum(len(answer.tokens) - 1 for answer in answers)
            rows.append(
                {
                    "method": method,
                    "set": self._name,
                    "tokens_per_step": decoded / max(sum(answer.steps for answer in answers), 1),
                    "decode_ratio_to_plain": sum(a.seconds for a in plain)
                    / sum(a.seconds for a in answers),
                    "cpu_ratio_to_plain": sum(a.cpu_seconds for a in plain)
                    / sum(a.cpu_seconds for a in answers),
                    "identical": all(
                        a.tokens == b.tokens for a, b in zip(plain, answers, strict=True)
                    ),
                    "tokens": decoded,
                    "steps": sum(answer.steps for answer in answers),
                    "seconds": sum(answer.seconds for answer in answers),
                    "cpu_seconds": sum(answer.cpu_seconds for answer in answers),
                    "accepted_predicted": sum(answer.predicted[0] for answer in answers),
                    "rejected_predicted": sum(answer.predicted[1] for answer in answers),
                }
            )
        return rows


def edit_rows(engines: dict[str, Any], tokenizer: Any, options: Any) -> list[Row]:
    """Return the rows of both sets of edits."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    tasks = [task for task in edits(options.per_kind) if task.kind in options.sets]
    if not tasks:
        return []
    seen, unseen = Sums("seen", options), Sums("unseen", options)

    def contestants(right: Any, wrong: Any) -> list[Contestant]:
        rows = [Contestant(method, llm, {}) for method, llm in engines.items()]
        ours = engines[OURS]
        return [
            *rows,
            Contestant("prediction", ours, {"prediction": right}),
            Contestant("wrong_prediction", ours, {"prediction": wrong}),
        ]

    for task in tasks:
        prompt = chat(tokenizer, f"{task.request} this file. Answer with the file.\n{task.source}")
        seen.compare(contestants(task.source, task.source[::-1]), prompt, params)
    prompts = [chat(tokenizer, _writing(task, number)) for number, task in enumerate(tasks)]
    answers = [
        tokenizer.decode(decode(engines[PLAIN], prompt, params).tokens) for prompt in prompts
    ]
    texts = [undone(answer, task.kind) for answer, task in zip(answers, tasks, strict=True)]
    for prompt, text in zip(prompts, texts, strict=True):
        unseen.compare(contestants(text, text[::-1]), prompt, params)
    return seen.rows() + unseen.rows()


def _writing(task: Edit, number: int) -> str:
    return f"Write version {number} of a Python class `{task.topic.title()}` with four methods."


def schema_rows(engines: dict[str, Any], tokenizer: Any, options: Any) -> list[Row]:
    """Return the rows of the JSON schemas: of each form, and of all."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    sums: dict[str, Sums] = {}
    contestants = [Contestant(method, llm, {}) for method, llm in engines.items()]
    contestants.append(Contestant(f"{OURS}_unforced", engines[OURS], {}, False))
    for form, question, schema in schemas()[: options.schemas]:
        if form not in options.sets:
            continue
        params = SamplingParams(
            temperature=0.0,
            max_tokens=options.max_tokens,
            structured_outputs=StructuredOutputsParams(json=json.dumps(schema)),
        )
        prompt = chat(tokenizer, f"{question} Its schema is {json.dumps(schema)}")
        for name, text in ((form, prompt), (f"{form}_unseen", chat(tokenizer, question))):
            sums.setdefault(name, Sums(name, options)).compare(contestants, text, params)
    for name, forms in (("schemas", FORMS), ("schemas_unseen", [f"{f}_unseen" for f in FORMS])):
        parts = [sums[form] for form in forms if form in sums]
        if parts:
            sums[name] = Sums(name, options, parts)
    return [row for of_set in sums.values() for row in of_set.rows()]


def chat(tokenizer: Any, message: str) -> list[int]:
    """Return a chat of one message as token ids."""
    from vllm_trie.lab.tiny_model.chat_prompts import chat_tokens

    tokens: list[int] = chat_tokens(tokenizer, message)
    return tokens


def main() -> None:
    """Measure and print."""
    smoke = {"per_kind": 1, "schemas": 1, "max_tokens": 8, "no_peers": True}
    parser = option_parser(__doc__, repeats=1, smoke=smoke)
    add_model_option(parser, "a chat model; the shipped one if left out")
    sets = (*KINDS, *FORMS)
    parser.add_argument("--sets", nargs="+", choices=sets, default=sets)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--per-kind", type=int, default=6, help="edits of each of five kinds")
    parser.add_argument("--schemas", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--no-peers", action="store_true", help="leave vLLM's own drafters out")
    add_device_options(parser)
    options = parser.parse_args()
    report_quietly(run, options, COLUMNS)


def run(options: Any) -> list[Row]:
    """Start all engines, then measure."""
    from transformers import AutoTokenizer

    from vllm_trie.lab.tiny_model import model_path

    check_device(options.device)
    model = options.model or str(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {
        **engine_options(options),
        "max_model_len": local_engine.room_for(700, options.max_tokens, options.nodes),
        "max_num_seqs": 1,
    }
    methods = available([OURS] if options.no_peers else [OURS, *PEERS])
    engines = {PLAIN: local_engine.start_engine(model, **settings)}
    keep_kernel_overrides()
    for method in methods:
        config = METHODS[method] or {}
        if method == OURS:
            config = {**config, "num_speculative_tokens": options.nodes}
        engines[method] = local_engine.start_engine(
            model,
            **settings,
            speculative_config={**config, **local_engine.without_memory(method)},
        )
    return edit_rows(engines, tokenizer, options) + schema_rows(engines, tokenizer, options)


if __name__ == "__main__":
    main()
