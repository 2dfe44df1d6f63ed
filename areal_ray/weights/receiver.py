"""The engine's side of a weight update: a thread of its own that receives into the staging.

    idle -> receiving -> staged -> (apply) -> idle
                     `-> failed -> (discard) -> idle

While a receiver is receiving, the engine goes on generating with the weights it has. `apply`
puts what was staged into the model, once; it raises what went wrong if that is not whole.
`discard` does not wait: a thread that still hangs in the group is abandoned with all that it
holds, and ends when the sender closes the group, or with the group's time limit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from areal_ray.errors import TornWeights, WeightUpdateError
from areal_ray.weights.checksum import checksum
from areal_ray.weights.layout import StreamLayout
from areal_ray.weights.staging import Staging
from areal_ray.weights.transport import Transport, hang_up, join
from areal_ray.weights.update import GroupMember, WeightUpdate

BUCKETS_AWAITED = 2
GRACE_S = 2.0
"""How long an aborted in-place update waits for its thread, which has been called off."""


class StagingReceiver:
    def __init__(
        self,
        device: torch.device,
        make_staging: Callable[[StreamLayout], Staging],
        *,
        join: Callable[[GroupMember], Transport] = join,
    ) -> None:
        self._device = device
        self._make_staging = make_staging
        self._join = join
        self._layout: StreamLayout | None = None
        self._staging: Staging | None = None
        """Kept from update to update, unless an abandoned thread may still write to it."""
        self._group: Transport | None = None
        self._reception: _Reception | None = None

    def start(self, update: WeightUpdate) -> None:
        """Begin to receive, in the background. The group of the last update is used again."""
        if self._reception is not None:
            raise WeightUpdateError("a weight update began before the last one ended")
        if self._group is not None and self._group.member != update.member:
            self._group.close()
            self._group = None
        if self._layout is None or self._layout.manifest != update.manifest:
            self._staging = None
            self._layout = StreamLayout(update.manifest)
        if self._staging is None:
            self._staging = self._make_staging(self._layout)
            if self._device.type == "cuda":
                # Its memory is written on another stream than it was made on.
                torch.cuda.synchronize(self._device)
        group = self._group
        self._reception = _Reception(
            lambda: group or self._join(update.member),
            self._layout,
            self._staging,
            self._device,
            verify=update.verify,
        )

    def apply(self) -> None:
        """Into the model, under a pause. Waits for the thread, which the group's limit ends."""
        if self._reception is None:
            raise WeightUpdateError("no weights were staged")
        self._group = self._reception.result()
        self._reception = None
        self._staging.apply()

    def discard(self) -> str:
        """Let go of what was staged; returns what had gone wrong, if anything had.

        Raises `TornWeights` if a part of it is in the model already.
        """
        reception, self._reception = self._reception, None
        group, self._group = self._group, None
        if reception is None:
            if group is not None:
                group.close()  # so that nobody waits for us
            return ""
        reception.interrupt()
        if self._staging.writes_in_place:
            # Under a pause, so there is time: one that has not begun to write is not torn.
            reception.wait(GRACE_S)
        if reception.is_alive:
            self._staging = None
        if reception.has_written_in_place:
            raise TornWeights(f"a part of an update is in the model: {reception.trouble()}")
        return reception.trouble()


class _Reception:
    """One update's worth of receiving. Owns its thread and all that the thread touches."""

    def __init__(
        self,
        join: Callable[[], Transport],
        layout: StreamLayout,
        staging: Staging,
        device: torch.device,
        *,
        verify: bool,
    ) -> None:
        self._layout = layout
        self._staging = staging
        self._device = device
        self._verify = verify
        self._has_begun = self._is_whole = False
        self._group: Transport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(join,), name="weight-staging", daemon=True
        )
        self._thread.start()

    def result(self) -> Transport:
        self._thread.join()
        if not self._is_whole:
            raise WeightUpdateError(
                f"the weights did not arrive whole: {self._error}"
            ) from self._error
        return self._group

    def interrupt(self) -> None:
        """Let go of the group: of one that was received whole in, or from outside, if it hangs."""
        if self._group is not None:
            if self.is_alive:
                self._group.interrupt()
            else:
                self._group.close()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def has_written_in_place(self) -> bool:
        return self._staging.writes_in_place and (self._has_begun or self.is_alive)

    def trouble(self) -> str:
        if self.is_alive:
            return "it was still receiving"
        return "" if self._error is None else str(self._error)

    def _run(self, join: Callable[[], Transport]) -> None:
        try:
            with _beside_generation(self._device):
                group = self._group = join()
                try:
                    self._receive(group)
                except BaseException as error:
                    # So that nobody waits for us to the time limit. Here, and not in `discard`:
                    # it waits for what is still on its way.
                    hang_up(group, error)
                    raise
            self._is_whole = True
        except Exception as error:  # noqa: BLE001 - raised by `result`, told by `trouble`
            self._error = error

    def _receive(self, group: Transport) -> None:
        """The next bucket is on its way while the last one is put in its place."""
        sums = torch.zeros(len(self._layout.buckets), dtype=torch.int64, device=self._device)
        coming: deque[tuple[int, range, torch.Tensor, torch.distributed.Work]] = deque()

        def take_the_first() -> None:
            number, bucket, buffer, work = coming.popleft()
            work.wait()
            if self._verify:
                sums[number] = checksum(buffer)
            self._has_begun = True
            self._staging.arrived(bucket, buffer)

        for number, bucket in enumerate(self._layout.buckets):
            if len(coming) == BUCKETS_AWAITED:
                take_the_first()
            buffer = self._staging.buffer(bucket)
            coming.append((number, bucket, buffer, group.broadcast(buffer)))
        while coming:
            take_the_first()
        wrong = self._mismatch(group, sums) if self._verify else ""
        all_are_right = group.acknowledge(self._device, is_right=not wrong)
        if wrong or not all_are_right:
            raise WeightUpdateError(wrong or "what another engine received is not what was sent")

    def _mismatch(self, group: Transport, mine: torch.Tensor) -> str:
        theirs = torch.empty_like(mine)
        group.broadcast(theirs).wait()
        wrong = torch.nonzero(mine != theirs).flatten().tolist()
        return f"checksum mismatch in buckets {wrong} of {len(mine)}" if wrong else ""


@contextmanager
def _beside_generation(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream of our own on the worker's device, so that decoding is not held up."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
