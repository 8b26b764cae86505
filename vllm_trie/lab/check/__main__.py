"""The process of one part: `python -m vllm_trie.lab.check PART SETTINGS RESULT`.

Not for users. The first two arguments are JSON, the third is the file for the
:class:`~vllm_trie.lab.check.parts.Outcome`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from vllm_trie.lab import local_engine, models
from vllm_trie.lab.check.parts import Outcome, Part, Settings


def main(part_json: str, settings_json: str, result: str) -> None:
    """Do a part's work and write its outcome."""
    part = Part.model_validate_json(part_json)
    settings = Settings.model_validate_json(settings_json)
    environment = dict(local_engine.ENVIRONMENT)
    if not models.is_shipped(settings.model):
        del environment["OMP_NUM_THREADS"]  # other models gain from all cores
    local_engine.set_environment(verbose=True, defaults=environment)
    module, _, function = part.work.partition(":")
    work = getattr(importlib.import_module(f"vllm_trie.lab.check.{module}"), function)
    outcome: Outcome = work(settings, **part.arguments)
    Path(result).write_text(outcome.model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
