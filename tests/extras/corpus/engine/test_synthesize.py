"""`vllm-trie corpus synthesize` with the shipped model, whose corpus an engine then drafts from."""

import json
from pathlib import Path

from vllm import SamplingParams

from tests.engine.compare import speculation
from tests.engine.conftest import Engines
from tests.engine.families import with_own_tokenizer
from tests.engine.prompts import prompts
from tests.processes import run_python
from vllm_trie.extras.corpus.corpus_file import read_header
from vllm_trie.lab.local_engine import verifier_of

RUN_BOTH = """
import json, sys
from vllm_trie.cli import app
for command in json.loads(sys.argv[1]):
    app(command, standalone_mode=False)
"""


def test_a_corpus_of_the_models_own_answers(tmp_path):
    corpus, model = tmp_path / "own.corpus", with_own_tokenizer(tmp_path / "model")
    questions = tmp_path / "questions.txt"
    questions.write_text("What is a trie?\nWhat is a cache?\n")
    other = tmp_path / "asked.corpus"
    command = ["corpus", "synthesize", model, "--batch", "16"]
    command += ["--engine", '{"trust_remote_code": true}']
    command += ["--question-tokens", "300", "-o"]  # this model ends few questions
    free = [*command, str(corpus), "--tokens", "1200"]
    asked = [*command, str(other), "--tokens", "9000", "--prompts", str(questions)]
    done = run_python("-c", RUN_BOTH, json.dumps([free, asked]), HF_HOME=str(tmp_path / "hub"))
    assert "held-out answers, 32 nodes" in done.stdout
    header = read_header(corpus)
    assert header.num_tokens >= 1200
    _, *lines = Path(f"{corpus}.answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert sum(len(answer["token_ids"]) for answer in answers) == header.num_tokens
    assert len({answer["question"] for answer in answers}) == len(answers)
    assert "name more of them" in done.stderr
    assert read_header(other).num_documents == 2

    engines = Engines()
    llm = engines(**speculation("ngram_trie", 16, store_tokens=0, corpus=str(corpus)))
    plain = engines()
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    outputs = [
        [
            result.outputs[0].token_ids
            for result in engine.generate(prompts(4), params, use_tqdm=False)
        ]
        for engine in (llm, plain)
    ]
    totals = verifier_of(llm).totals
    engines.close()
    assert outputs[0] == outputs[1]
    assert totals.tokens > totals.steps
