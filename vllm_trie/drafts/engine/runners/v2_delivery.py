"""Drafts on their way to the device, where a step reads them.

A step is launched behind its drafts, or ahead of them, while the step before still runs. The device
then waits for the drafts in front of the step, in a kernel that reads the host's memory::

    device   [ step k ][ waits ][ step k + 1 ]
    host       launches k + 1   [ tokens of k, drafts, delivers ]

The kernel gives up after :data:`_MOST_READS` reads, and the step then verifies fillers. So a host
that delivers nothing costs a step its drafts, and the device never waits for good. A host may fail,
or wait for the device itself: CUDA does where it loads a kernel or allocates memory.

Of a row of the host's memory, which holds the draft of a request::

    column    0     1                          2 ... N + 1
    value     slot  number of drafted tokens   drafted tokens, fillers

Each value but the slot carries the number of its delivery in its upper 32 bits. A value that has
arrived is therefore known as such, in whatever order the device sees the host's writes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.triton_utils import tl, triton
from vllm.utils.platform_utils import is_uva_available
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu import buffer_utils

_FILLER = 0
"""Any token of the vocabulary: the model computes it, verification never accepts it."""
_MOST_READS = 1 << 16
"""Reads of the host's memory before a waiting kernel gives up. An H200 took 0.62 s for four times
as many. CUDA loads a kernel only while the device is idle, so its first launch can take as long."""
_MOST_LATE = 3
"""Deliveries in a row that the device gave up, until no step is launched ahead for a while."""
_FIRST_PAUSE_S = 600.0
_PAUSE_FACTOR = 6  # of each pause over the one before: what always waits costs next to nothing

logger = init_logger(f"vllm.{__name__}")


def packed(drafts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Return int64 [requests, 1 + width]: the number of each draft's tokens, they, and fillers."""
    rows = [[len(draft), *draft, *[_FILLER] * (width - len(draft))] for draft in drafts]
    return np.array(rows, dtype=np.int64).reshape(len(drafts), 1 + width)


class DraftPlaces:
    """Where the drafts of some requests go in a delivery, known before they are.

    Args:
        request_ids: Of the drafts, in their order.
        places: Of the delivery's rows in their order, how many drafted tokens each takes.
        width: N of a row.
    """

    def __init__(self, request_ids: Sequence[str], places: Mapping[str, int], width: int) -> None:
        row_of = {request_id: row for row, request_id in enumerate(places)}
        # A draft that goes nowhere takes the row behind the others.
        self._rows = [row_of.get(request_id, len(places)) for request_id in request_ids]
        self._places = np.array([places.get(request_id, 0) for request_id in request_ids])
        self._values = np.zeros((len(places) + 1, 1 + width), dtype=np.int64)
        self._column = np.arange(width)

    def packed(self, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return drafts, cut to their places, as :func:`packed` does.

        Args:
            lengths, tokens: int [drafts], and [drafts, any width] with anything behind a draft.
        """
        lengths, size = np.minimum(lengths, self._places), min(tokens.shape[1], len(self._column))
        self._values[self._rows, 0] = lengths
        is_drafted = self._column[:size] < lengths[:, None]
        self._values[self._rows, 1 : 1 + size] = tokens[:, :size] * is_drafted
        return self._values[:-1]


class Delivery:
    """Writes each step's drafts to the device, or lets the device wait for them.

    Args:
        draft_tokens: int64 [max_num_seqs, N] on the device, where vLLM reads them.
        may_wait: Whether the device is to wait.

    Attributes:
        num_drafted: int64 [max_num_seqs] on the device, drafted tokens of the requests whose drafts
            the step verifies, by the runner's request index.
    """

    def __init__(self, draft_tokens: torch.Tensor, may_wait: bool) -> None:
        max_num_reqs, self._width = draft_tokens.shape
        self._draft_tokens = draft_tokens
        self.num_drafted = draft_tokens.new_zeros(max_num_reqs)
        reads_host = is_uva_available() or draft_tokens.device.type == "cpu"
        self._is_shared = may_wait and reads_host
        self._resumes_at, self._pause_s = 0.0, _FIRST_PAUSE_S  # by time.monotonic; the next one
        self._number = self._num_late = 0  # of the last delivery; of those given up in a row
        self._delivered = -1  # number of the last complete one
        if self._is_shared:
            # Two, as the device may still read the last one where the next is reserved; both at
            # addresses that Triton compiles one kernel for.
            shape = 2, max_num_reqs + max_num_reqs % 2, 2 + self._width
            self._shared = buffer_utils.UvaBuffer(shape, dtype=torch.int64)
            self._given_up = buffer_utils.UvaBuffer(2, dtype=torch.int64)
            self._rows = self._shared.np[0, :0]

    @property
    def can_wait(self) -> bool:
        """Whether the device can wait: where it reads the host's memory, and has not given up too
        often of late."""
        return self._is_shared and time.monotonic() >= self._resumes_at

    def send(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Write drafts that are known; `slots` are the runner's indices of the requests."""
        rows = np.concatenate([np.array(slots)[:, None], packed(drafts, self._width)], axis=1)
        staged = async_tensor_h2d(rows, device=self._draft_tokens.device)
        self._launch(staged, len(slots), 0, self.num_drafted)

    def reserve(self, slots: Sequence[int]) -> None:
        """Begin a delivery to these requests, once the step before the last has ended."""
        self._number = self._number % (2**31 - 2) + 1
        self._rows = self._shared.np[self._number % 2, : len(slots)]
        self._rows[:, 0] = slots

    def launch(self) -> None:
        """Let the device wait for the delivery; what is launched from now on comes behind it."""
        shared, given_up = self._shared.uva(), self._given_up.uva()
        self._launch(shared[self._number % 2], len(self._rows), self._number, given_up)

    def deliver(self, rows: np.ndarray) -> None:
        """Let the device go on with the requests' drafts, see :func:`packed`; the step before has
        ended."""
        self._rows[:, 1:] = rows | self._number << 32
        is_late = self._given_up.np[self._delivered % 2] == self._delivered
        self._num_late = self._num_late + 1 if is_late else 0
        self._delivered = self._number
        if self._num_late == _MOST_LATE:
            self._num_late, self._resumes_at = 0, time.monotonic() + self._pause_s
            logger.warning(
                "vllm-trie: no step is launched ahead of its drafts for %d minutes: %d in a row "
                "waited in vain for them, as after a stop of the host. Output is not affected. If "
                "this line comes again and again, something in this engine waits for the GPU while "
                "a step is launched: set launch_ahead to false, and please report the line with "
                "what `vllm-trie doctor` prints.",
                *(self._pause_s / 60, _MOST_LATE),
            )
            self._pause_s *= _PAUSE_FACTOR

    def _launch(
        self, staged: torch.Tensor, num_rows: int, number: int, given_up: torch.Tensor
    ) -> None:
        _take_drafts[(num_rows,)](
            *(staged, self._draft_tokens, self.num_drafted, given_up, number, self._width),
            MOST_READS=_MOST_READS,
            BLOCK=triton.next_power_of_2(1 + self._width),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["number"])  # type: ignore[untyped-decorator]
def _take_drafts(  # type: ignore[no-untyped-def]
    staged_ptr,
    draft_tokens_ptr,
    num_drafted_ptr,
    given_up_ptr,
    number,
    width,
    MOST_READS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    in_use = column <= width
    row_ptr = staged_ptr + tl.program_id(0) * (2 + width)
    slot = tl.load(row_ptr)
    staged = tl.load(row_ptr + 1 + column, mask=in_use, other=0, volatile=True)
    num_missing = tl.sum((in_use & ((staged >> 32) != number)).to(tl.int32))
    num_reads = 1
    while (num_missing > 0) & (num_reads < MOST_READS):
        staged = tl.load(row_ptr + 1 + column, mask=in_use, other=0, volatile=True)
        num_missing = tl.sum((in_use & ((staged >> 32) != number)).to(tl.int32))
        num_reads += 1
    value = staged & 0x7FFFFFFF
    # Of a delivery that is not complete no token counts as drafted.
    num_drafted = tl.sum(tl.where((column == 0) & (num_missing == 0), value, 0))
    tl.store(num_drafted_ptr + slot, num_drafted)
    is_token = in_use & (column > 0)
    tl.store(draft_tokens_ptr + slot * width + column - 1, value, mask=is_token)
    tl.store(given_up_ptr + number % 2, number, mask=num_missing > 0)
