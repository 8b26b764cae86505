"""Chains of the plugin on a vLLM that makes its speculator by class path (patch 0009).

A program of its own, see :mod:`tests.engine.v2_on_cpu`. Prints one JSON object.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

import vllm

from tests.engine.compare import accepted_tokens, differences, generate
from tests.engine.v2_run import CHAINS, OPT_OUT, TEXTS, engine, greedy
from vllm_trie.drafts.engine.runners.v2 import HostSpeculator
from vllm_trie.lab.local_engine import runner_of


def main() -> None:
    v2_on_cpu.schedule_as_on_a_gpu()
    v2_on_cpu.use_v2(True)
    llm = engine(speculative_config=CHAINS)
    assert type(runner_of(llm).speculator) is HostSpeculator
    plain = generate(llm, TEXTS[:2], greedy(**OPT_OUT))
    drafted = [generate(llm, TEXTS[:2], greedy()) for _ in range(2)]  # the second from the first
    speculative = llm.llm_engine.vllm_config.speculative_config
    result = {
        "vllm": str(Path(vllm.__file__).parent),
        "method": speculative.method,
        "same": not any(differences(plain, outputs) for outputs in drafted),
        "accepted": accepted_tokens(llm) > 0,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
