"""What goes to the worker with a step: new rows, tokens of reused ones, slots of copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from vllm_trie.vllm_hooks.scheduler.blocks import RangedCopies
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup
from vllm_trie.vllm_hooks.scheduler.row_steps import REUSED_ROWS, ReusedRows

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class UnsentRows:
    """Owner of what goes to the worker with the next step.

    Attributes:
        ids: Rows that the worker does not know, or not any more.
        reused: Rows whose new tokens it does not know, by id.
        slots: First slot and end of queued copies, by target block.
    """

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.reused: dict[str, Request] = {}
        self.slots: dict[int, tuple[int, int]] = {}

    def forget(self, row_id: str) -> None:
        """Send nothing of a row that has gone."""
        self.ids.discard(row_id)
        self.reused.pop(row_id, None)

    def send(
        self, output: SchedulerOutput, scheduler: Scheduler, group_of: Mapping[str, BeamGroup]
    ) -> None:
        """Move rows that the worker does not know from a step's cached to its new requests.

        Tells the worker, too, the tokens of reused rows, and which slots the step's copies need.

        A new request carries its tokens and its block table. All its tokens become its prompt; from
        here on the scheduler counts its output tokens as the worker does.
        """
        if copies := output.kv_cache_block_copies:
            ranges = [self.slots.get(copy.dst_block_id) for copy in copies]
            output.kv_cache_block_copies = RangedCopies(copies, ranges)
            self.slots = {}
        if self.reused:
            setattr(output, REUSED_ROWS, self._take_reused(group_of))
        self.ids.difference_update(new.req_id for new in output.scheduled_new_reqs)
        cached = output.scheduled_cached_reqs
        unknown = [i for i, row_id in enumerate(cached.req_ids) if row_id in self.ids]
        for i in unknown:
            row_id = cached.req_ids[i]
            row = scheduler.requests[row_id]
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=row_id,
                    # An array: workers copy it many times faster than a list.
                    prompt_token_ids=group_of[row_id].all_tokens(row),  # type: ignore[arg-type]
                    mm_features=[],
                    sampling_params=row.sampling_params,
                    pooling_params=None,
                    block_ids=scheduler.kv_cache_manager.get_block_ids(row_id),
                    num_computed_tokens=cached.num_computed_tokens[i],
                    lora_request=row.lora_request,
                    prefill_token_ids=row._all_token_ids if scheduler.use_v2_model_runner else None,
                )
            )
            row.num_prompt_tokens = row.num_tokens
            row._output_token_ids.clear()
            self.ids.discard(row_id)
        if unknown:
            _drop(cached, set(unknown))

    def _take_reused(self, group_of: Mapping[str, BeamGroup]) -> list[ReusedRows]:
        rows_of: dict[BeamGroup, list[Request]] = {}
        for row_id, row in self.reused.items():
            rows_of.setdefault(group_of[row_id], []).append(row)
        self.reused = {}
        return [
            ReusedRows(
                [row.request_id for row in rows],
                group.prompt.size,
                np.array([row._all_token_ids[group.prompt.size :] for row in rows], dtype=np.int32),
            )
            for group, rows in rows_of.items()
        ]


def _drop(cached: CachedRequestData, places: set[int]) -> None:
    """Take the requests in these places out."""
    for i in places:
        cached.resumed_req_ids.discard(cached.req_ids[i])
        cached.all_token_ids.pop(cached.req_ids[i], None)
    lists: tuple[list[Any], ...] = (
        cached.req_ids,
        cached.new_token_ids,  # may be empty
        cached.new_block_ids,
        cached.num_computed_tokens,
        cached.num_output_tokens,
    )
    for values in lists:
        values[:] = [value for i, value in enumerate(values) if i not in places]
    # A cached property of the old lists.
    cached.__dict__.pop("_req_id_to_num_output_tokens", None)
