"""The package's log lines go where vLLM's go, though vLLM sets up its logger later."""

from __future__ import annotations

import logging

import pytest
from vllm import logger as vllm_logger

from vllm_trie.hooks import plugin
from vllm_trie.hooks.ledger import record
from vllm_trie.hooks.ledger.installation import Installation
from vllm_trie.hooks.start import log_lines  # noqa: F401 - records an entry


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def loggers(monkeypatch):
    """vLLM's logger and the package's, both as in a fresh process."""
    pair = logging.getLogger("vllm"), logging.getLogger("vllm_trie")
    before = [(logger.handlers, logger.level, logger.propagate) for logger in pair]
    for logger in pair:
        logger.handlers = []
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
    yield pair
    for logger, (handlers, level, propagate) in zip(pair, before, strict=True):
        logger.handlers = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def test_lines_reach_what_vllm_sets_up_later(loggers):
    theirs, _ = loggers
    plugin._log_as_vllm_does()
    plugin._log_as_vllm_does()
    ours = logging.getLogger("vllm_trie.drafts.engine.frontend.metrics")
    ours.info("too early")
    records = Records()
    theirs.addHandler(records)
    theirs.setLevel(logging.INFO)
    theirs.propagate = False
    ours.info("a line of %s", "statistics")
    ours.debug("too detailed")
    theirs.setLevel(logging.DEBUG)
    ours.debug("wanted")
    assert records.lines == ["a line of statistics", "wanted"]


def test_a_file_that_sets_up_vllms_logging_leaves_ours_on(loggers, monkeypatch):
    """By default such a file disables the loggers that it does not name."""
    theirs, _ = loggers
    plugin._log_as_vllm_does()
    ours = logging.getLogger("vllm_trie.extras.device_checks.release_check")
    other = logging.getLogger("test_logging")

    def dict_config(config: object) -> None:
        ours.disabled = other.disabled = True

    monkeypatch.setattr(vllm_logger, "dictConfig", dict_config)
    target = f"{vllm_logger.__name__}:_configure_vllm_root_logger"
    [patch] = [entry for entry in record.ENTRIES if entry.target == target]
    installation = Installation()
    installation.apply(patch)
    vllm_logger._configure_vllm_root_logger()
    installation.undo()
    assert other.disabled
    records = Records()
    theirs.addHandler(records)
    ours.warning("a check failed")
    assert records.lines == ["a check failed"]
