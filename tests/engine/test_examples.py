"""The examples as their users run them, and a drafter that comes from another package."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.engine.serving import IN_ENGINE, WORKER_IN_ENGINE
from tests.processes import ROOT, run_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "examples"
OWN_METHOD = "paper_ngram_trie"

# These keep their engine in the process, so one process runs them all and imports vLLM once.
IN_ONE_PROCESS = (
    "rag_and_code_editing.py --tensor-parallel-size 2",  # first, as its ranks are forked
    "offline.py",
    "offline.py --method lookahead_trie",
    "offline.py --method trie_union",
    "corpus_and_warm_start.py",
    "rag_and_code_editing.py",
    "beam_nbest.py",
    "rl/rollouts.py",
    "own_drafter/run.py",
)
RUN_ALL = """
import runpy, sys
from tests.engine.conftest import do_once_what_starts_repeat
do_once_what_starts_repeat()
for command in sys.argv[1:]:
    print(f"<<< {command}", flush=True)
    sys.argv = command.split()
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*command: str, **environment: str) -> str:
    """What a Python process with these arguments prints."""
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM logs to the standard output
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS holds, as in all tests
        **environment,
    }
    return run_python(*command, **variables).stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """PYTHONPATH of a folder with the package of `own_drafter`, installed as any package."""
    folder = tmp_path_factory.mktemp("own_drafter")
    source = shutil.copytree(EXAMPLES / "own_drafter", folder / "source")  # builds leave traces
    command = "pip install --quiet --no-index --no-deps --no-build-isolation --target"
    run("-m", *command.split(), str(folder / "site"), str(source))
    return os.pathsep.join([str(folder / "site"), str(ROOT)])


@pytest.fixture(scope="module")
def printed(site):
    """What each example printed."""
    paths = [str(EXAMPLES / name) for name in IN_ONE_PROCESS]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": site}
    text = run("-c", RUN_ALL, *paths, **environment)
    parts = dict(part.split("\n", 1) for part in text.split("<<< ")[1:])
    assert list(parts) == paths
    return {name: parts[path] for name, path in zip(IN_ONE_PROCESS, paths, strict=True)}


def test_every_example_is_run():
    alone = re.findall(r'run\("examples/(.*?)"', Path(__file__).read_text())
    run_here = {*alone, *(command.split()[0] for command in IN_ONE_PROCESS)}
    paths = [path for path in EXAMPLES.rglob("*.py") if path.name != f"{OWN_METHOD}.py"]
    assert {path.relative_to(EXAMPLES).as_posix() for path in paths} == run_here
    readme = (EXAMPLES / "README.md").read_text()
    assert all(path.name in readme for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("options", ["", " --method lookahead_trie", " --method trie_union"])
def test_offline(printed, options):
    text = printed[f"offline.py{options}"]
    assert text.count("\n--- ") == 3
    assert "class Stack" in text
    tokens, steps = map(int, re.findall(r"(\d+) tokens in (\d+) steps", text)[0])
    assert 0 < steps < tokens


def test_corpus_and_warm_start(printed):
    text = printed["corpus_and_warm_start.py"]
    cold, warm = map(float, re.findall(r"start: ([\d.]+) tokens per step", text))
    assert 1 < cold < warm


@pytest.mark.parametrize("options", ["", " --tensor-parallel-size 2"])
def test_rag_and_code_editing(printed, options):
    text = printed[f"rag_and_code_editing.py{options}"]
    rows = re.findall(r"^(RAG|editing) +(\d+) +(\d+) +([\d.]+)  (yes|no)$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["RAG", "editing"]
    for _, tokens, steps, rate, same in rows:
        assert float(rate) == pytest.approx(int(tokens) / int(steps), abs=0.01)
        assert float(rate) > 1.5
        assert same == "yes"
    assert f"\nranks: {2 if options else 1}\n" in text


def test_beam_nbest(printed):
    text, native = printed["beam_nbest.py"].split("=== LLM.beam_search")
    lists = re.split(r"^(?:diverse )?beam, width 8:$", text, flags=re.MULTILINE)[1:]
    assert len(lists) == 4
    line = r"^  (\d)\. score +(-[\d.]+)   log p +(-[\d.]+) +(\d+) tokens   ('.*'|\".*\")$"
    for index, part in enumerate(lists):
        rows = re.findall(line, part, re.MULTILINE)
        assert [row[0] for row in rows] == ["1", "2", "3", "4"]
        scores = [float(row[1]) for row in rows]
        assert scores == sorted(scores, reverse=True)
        assert len({row[4] for row in rows}) == 4
        if index % 2 == 0:  # the scores of diverse beams have paid for their diversity
            for _, score, log_p, length, _ in rows:
                assert float(score) == pytest.approx(float(log_p) / int(length) ** 0.6, abs=2e-4)
    assert lists[0] != lists[1]
    rows = re.findall(r"^  (\d)\. log p +(-[\d.]+) ", native, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]


def test_rollouts(printed):
    text = printed["rl/rollouts.py"]
    rates = list(map(float, re.findall(r"epoch \d: ([\d.]+) tokens per step", text)))
    assert len(rates) == 3
    assert 1 < rates[0] < max(rates[1:])


def test_own_drafter(printed):
    text = printed["own_drafter/run.py"]
    accepted, tokens = map(int, re.findall(r"(\d+) of (\d+) tokens came from drafts", text)[0])
    assert tokens / 3 < accepted < tokens
    assert "same as without drafts: yes" in text


def test_serve_openai_client():
    text = run("examples/serve_openai_client.py", *WORKER_IN_ENGINE, **IN_ENGINE)
    parts = re.split(r"^=== (.*)$", text, flags=re.MULTILINE)
    titles, bodies = parts[1::2], parts[2::2]
    assert titles == [
        "chat", "the same, streamed, and without drafts", "chat with a prediction", "completion",
        "beam search",
    ]  # fmt: skip
    chat, streamed, predicted, completion, beams = bodies
    assert "--speculative-model ngram_trie" in parts[0]
    assert "def count_words(lines):" in chat
    assert int(predicted.rsplit(":", 1)[1]) > 0
    assert chat.strip() in streamed
    assert "equal: yes" in streamed
    assert len(completion.strip()) > len("def main():")
    ranked = re.findall(r"^  (\d)\. (.*)$", beams, re.MULTILINE)
    assert [rank for rank, _ in ranked] == ["1", "2", "3"]
    assert len({hypothesis for _, hypothesis in ranked}) == 3


def test_medusa_train_and_serve():
    text = run("examples/medusa_train_and_serve.py", *WORKER_IN_ENGINE, **IN_ENGINE)
    assert "saved to " in text
    assert re.findall(r"^head (\d): \d+% ", text, re.MULTILINE) == ["1", "2", "3", "4"]
    accepted, tokens = map(int, re.findall(r"(\d+) of (\d+) tokens came from the heads", text)[0])
    assert 0 < accepted < tokens
    assert "same as without drafts: yes" in text


def test_recommendation():
    options = ["--items", "20000", "--width", "40", *WORKER_IN_ENGINE]
    # The example imports its neighbour.
    text = run("examples/recommendation.py", *options, **IN_ENGINE, PYTHONPATH=str(EXAMPLES))
    assert "20000 items of 3 to 5 tokens" in text
    assert "160 of 160 answers are different items of the catalogue" in text
