"""The package's log lines go where vLLM's go, though vLLM sets up its logger later."""

from __future__ import annotations

import logging

import pytest

from vllm_trie.hooks import plugin


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
