"""Traces of the requests that ask for one, as files in the operator's folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vllm.logger import init_logger

from vllm_trie.drafts.engine.draft_requests import ends_with
from vllm_trie.drafts.engine.observers import StepObserver
from vllm_trie.extras.traces.options import trace_path
from vllm_trie.extras.traces.request import TRACE
from vllm_trie.extras.traces.trace_file import Header, NoDraft, Step, TraceWriter

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_trie.drafts import Drafter, DrafterContext
    from vllm_trie.drafts.engine.config import TreeConfig
    from vllm_trie.drafts.engine.tree_step import TreeStep
    from vllm_trie.hooks.wire import TreeStats
    from vllm_trie.tree import TokenTree

logger = init_logger(f"vllm.{__name__}")

SUFFIX = ".trace.jsonl"
MAX_FILES = 1000
"""Traces in the folder; beyond it requests are decoded untraced."""
_LOOK_AGAIN_S = 60.0
"""Until a full folder is looked at again."""


@dataclass(slots=True)
class _Followed:
    """A request that is being recorded.

    Attributes:
        no_draft: Of its next step, see :class:`Step`.
    """

    file: BinaryIO
    writer: TraceWriter
    params: SamplingParams
    last_time: float
    no_draft: NoDraft = "prefill"


class TraceRecorder(StepObserver):
    """Writes a file for each request that asks for its trace.

    A fault, of the disk or in what is recorded, ends the trace and never the request.

    Args:
        folder: Exists, writable.
        tree_config: The engine's speculation.
        drafter: Of this rank.
    """

    def __init__(self, folder: Path, tree_config: TreeConfig, drafter: Drafter) -> None:
        self._folder = folder
        self._method = tree_config.method
        self._options = _options(tree_config, drafter.context)
        self._drafter = drafter
        self._followed: dict[str, _Followed] = {}
        self._full_until = 0.0  # by time.perf_counter; 0 with room

    def begun(self, requests: Sequence[NewRequestData]) -> None:
        """Follow those of the requests that are new and ask for a trace."""
        num_files: int | None = None
        for request in requests:
            params = request.sampling_params
            if params is None or not (params.extra_args or {}).get(TRACE):
                continue
            if request.req_id in self._followed:  # preempted, and starting again
                continue
            if time.perf_counter() < self._full_until:
                return
            try:
                if num_files is None:  # once a step, however many samples a request has
                    num_files = self._num_files()
                if num_files >= MAX_FILES:
                    self._wait_for_room()
                    return
                self._followed[request.req_id] = self._follow(request, params)
                num_files, self._full_until = num_files + 1, 0.0
            except Exception as error:
                logger.warning("vllm-trie: no trace of request %r: %s", request.req_id, error)

    def ended(self, step: TreeStep, new_tokens: Sequence[Sequence[int]], stats: TreeStats) -> None:
        """Write a step of each followed request that got tokens."""
        if not self._followed:
            return
        now = time.perf_counter()
        for request_id, tree, path, sampled in zip(
            step.request_ids, step.trees, step.accepted, new_tokens, strict=True
        ):
            followed = self._followed.get(request_id)
            if followed is None or not (tokens := _before_stop(followed, sampled)):
                continue
            try:
                seconds = now - followed.last_time
                followed.writer.add(Step.of(tree, path, tokens, seconds, followed.no_draft))
            except (OSError, ValueError) as error:
                self._give_up(request_id, error)
            followed.last_time = now
            followed.no_draft = "pause"  # where no draft follows

    def drafted(
        self,
        request_ids: Sequence[str],
        drafts: Mapping[str, tuple[TokenTree, TokenTree]],
        has_failed: Callable[[str], bool],
    ) -> None:
        """Take in why the next step has no drafts."""
        if not self._followed:
            return
        for request_id in request_ids:
            followed = self._followed.get(request_id)
            if followed is None or followed.no_draft == "prefill":  # of more chunks
                continue
            if request_id not in drafts:
                followed.no_draft = "limit"
                continue
            proposed, tree = drafts[request_id]
            if tree.num_nodes:
                followed.no_draft = "dropped"
            elif has_failed(request_id):
                followed.no_draft = "failed"
            else:
                followed.no_draft = "budget" if proposed.num_nodes else "unknown"

    def released(self, request_id: str) -> None:
        """Complete the file of a request that has ended."""
        followed = self._followed.get(request_id)
        if followed is None:
            return
        try:
            followed.writer.finish()
            followed.file.close()
        except OSError as error:
            self._give_up(request_id, error)
        self._followed.pop(request_id, None)

    def _num_files(self) -> int:
        with os.scandir(self._folder) as entries:
            return sum(entry.name.endswith(SUFFIX) for entry in entries)

    def _wait_for_room(self) -> None:
        """Look at the folder, which is full, later; warn if it had room before."""
        if not self._full_until:
            logger.warning(
                "vllm-trie: no traces of further requests: trace_path=%r has %d; remove some",
                str(self._folder),
                MAX_FILES,
            )
        self._full_until = time.perf_counter() + _LOOK_AGAIN_S

    def _follow(self, request: NewRequestData, params: SamplingParams) -> _Followed:
        header = Header.of(
            request.req_id,
            self._method,
            self._drafter.context.model,
            self._drafter.context.tokenizer or self._drafter.context.model,
            request.prompt_token_ids or [],
            self._options,
        )
        name = re.sub(r"[^\w.-]", "_", request.req_id, flags=re.ASCII)[-120:]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        path = self._folder / f"{name}{SUFFIX}"
        descriptor = os.open(path, flags, 0o600)
        # Unbuffered: the file of a process that is killed has each step up to its last.
        file = os.fdopen(descriptor, "wb", buffering=0)
        try:
            writer = TraceWriter(file, header)
        except Exception:
            file.close()
            path.unlink()
            raise
        return _Followed(file, writer, params, time.perf_counter())

    def _give_up(self, request_id: str, error: Exception) -> None:
        logger.warning("vllm-trie: the trace of request %r ends: %s", request_id, error)
        with suppress(OSError):
            self._followed.pop(request_id).file.close()


def open_recorder(tree_config: TreeConfig, drafter: Drafter) -> TraceRecorder | None:
    """Return the recorder of an engine whose operator wants traces."""
    folder = trace_path(tree_config.engine_options)
    if folder is None or drafter.context.rank:  # all ranks see the same
        return None
    return TraceRecorder(Path(folder), tree_config, drafter)


def _options(tree_config: TreeConfig, context: DrafterContext) -> dict[str, Any]:
    """Return the options that differ from their defaults, and the nodes; no place, nor password."""
    options = {"num_speculative_tokens": context.num_nodes}
    for given in (tree_config.drafter_options, tree_config.engine_options):
        options |= given.model_dump(mode="json", exclude_defaults=True)
    return options


def _before_stop(followed: _Followed, tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens up to the one after which the scheduler ends the request."""
    ends = (i for i, token in enumerate(tokens, 1) if ends_with(followed.params, token))
    return tokens[: next(ends, None)]
