"""The validation of a device and a model: `vllm-trie validate`.

:mod:`vllm_trie.check.parts` is the table of what is checked. Each part runs in a process of its
own, and its result becomes a row of the report. Importing this package imports neither torch nor
vLLM.
"""

from __future__ import annotations

from vllm_trie.check.command import validate
from vllm_trie.check.parts import Part, all_parts
from vllm_trie.check.processes import run_parts
from vllm_trie.check.report import Report

__all__ = ["Part", "Report", "all_parts", "run_parts", "validate"]
