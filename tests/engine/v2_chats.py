"""A real model's chats on Model Runner V2 against V1, on a CPU, in float32.

A program of its own, see :mod:`tests.engine.v2_on_cpu`. Prints one JSON object: for plain vLLM,
chains and trees what differs from V1's plain answers, and tokens per step on V1 and on V2. It is
run by hand, as the interpreter needs some minutes for it: with the demo's prompts, or with the
first turns of Spec-Bench's questions:

    python -m tests.engine.v2_chats COUNT [QUESTIONS]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.engine.compare import differences, generate, speculation
from tests.engine.conftest import runner_of, trees_of
from vllm_trie.lab import smollm2
from vllm_trie.lab.demo.chat_prompts import chat_prompts
from vllm_trie.lab.tiny_model.chat_prompts import chat_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, detokenize=False)
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chains": speculation("ngram_trie", 8, verification="chain"),
    "trees": speculation("ngram_trie", 24, verification="tree"),
}


def messages(count: int, questions: str | None) -> list[str]:
    if questions is None:
        return [prompt.message for prompt in chat_prompts()][:count]
    with open(questions, encoding="utf-8") as file:
        turns = [json.loads(line)["turns"][0] for line in file]
    return turns[:: max(len(turns) // count, 1)][:count]  # of all categories


def main() -> None:
    count, *questions = sys.argv[1:]
    model = str(smollm2.fetch())
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = messages(int(count), questions[0] if questions else None)
    prompts = [{"prompt_token_ids": chat_tokens(tokenizer, text)} for text in texts]
    v2_on_cpu.schedule_as_on_a_gpu()
    expected: list[Any] = []
    result: dict[str, Any] = {}
    engines = []  # kept: the end of one would be the end of what they share
    for runner, is_v2 in (("V1", False), ("V2", True)):
        v2_on_cpu.use_v2(is_v2)
        for method, options in METHODS.items():
            llm = LLM(
                model=model,
                dtype="float32",
                enforce_eager=True,
                max_model_len=2048,
                max_num_seqs=4,
                kv_cache_memory_bytes=256 << 20,
                enable_prefix_caching=False,
                disable_log_stats=False,
                **options,
            )
            engines.append(llm)
            assert isinstance(runner_of(llm), GPUModelRunner) == is_v2
            outputs = generate(llm, prompts, GREEDY, batch_size=1)
            expected = expected or outputs
            row: dict[str, Any] = {"differences": differences(expected, outputs)}
            if options:
                # V1 counts tokens behind the end of a text too.
                num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                row["tokens_per_step"] = num_tokens / trees_of(llm).totals.steps
            result[f"{method} on {runner}"] = row
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
