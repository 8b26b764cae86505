"""The n-gram-trie paper's drafter of examples/own_drafter, registered without its installation."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_trie.drafts import available_methods, register

sys.path.append(str(Path(__file__).parents[2] / "examples" / "own_drafter"))

from paper_ngram_trie import PaperDrafter

if PaperDrafter.name not in available_methods():
    register(PaperDrafter)
