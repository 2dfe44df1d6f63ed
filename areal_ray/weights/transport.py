"""The group over which weights are broadcast: the trainer is rank 0, the engines follow.

NCCL between GPUs, gloo between CPUs, through one torch process group that leaves
torch.distributed's global state (vLLM's own world, the trainer's) alone. Every wait has the
group's time limit. All methods block: call them off the event loop.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed as dist

from areal_ray.errors import WeightUpdateError
from areal_ray.weights.update import GroupMember

CALLED_OFF = "called-off"
MEET_POLL_S = 0.002


class Rendezvous:
    """The meeting point of a group, hosted by the trainer on an address of its own node."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        self.host = host
        # Bound here rather than by torch, which would listen on every interface.
        self._socket = socket.create_server((host, 0))
        self.port: int = self._socket.getsockname()[1]
        self.store = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=self._socket.detach(),
        )

    def call_off(self, group_id: str) -> None:
        """Let those who still wait for the others of a group go, with an error."""
        dist.PrefixStore(group_id, self.store).set(CALLED_OFF, "")


class Transport(Protocol):
    """One process's place in a group. All that a weight update asks of the network."""

    member: GroupMember

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """Rank 0's bytes go to all. Returns at once; `wait` on the result."""

    def acknowledge(self, device: torch.device, *, is_right: bool) -> bool:
        """Say that all is here, and whether it is right; returns once every member has said so:
        whether all of them say that it is right.

        A member that can't say it is missed, and the wait ends with the group's time limit.
        """

    def close(self) -> None:
        """Hang up, by who used it last: it may wait for what is still on its way. Members that
        wait for us learn it."""

    def interrupt(self) -> None:
        """From another thread: end what hangs in it, if that can be done."""


def join(member: GroupMember, store: dist.Store | None = None) -> Transport:
    """Waits until all members have come, or the group is called off.

    `store`: of the meeting point, for the one who hosts it.
    """
    return {"gloo": GlooTransport, "nccl": NcclTransport}[member.backend](member, store)


def hang_up(group: Transport, error: BaseException) -> None:
    """Close a group that failed by `error`, whose traceback would otherwise keep what was on its
    way, and with it the connections, for as long as somebody remembers the error."""
    traceback.clear_frames(error.__traceback__)
    group.close()


class _ProcessGroup(ABC):
    def __init__(self, member: GroupMember, store: dist.Store | None) -> None:
        self.member = member
        timeout = timedelta(seconds=member.timeout_s)
        self._store = store or dist.TCPStore(
            member.host, member.port, is_master=False, timeout=timeout
        )
        prefixed = dist.PrefixStore(member.group_id, self._store)
        _wait_for_all(prefixed, member)
        self._group: dist.ProcessGroup | None = self._make(prefixed, timeout)

    @abstractmethod
    def _make(self, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup: ...

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._open.broadcast([buffer], options)

    def acknowledge(self, device: torch.device, *, is_right: bool) -> bool:
        vote = torch.tensor([int(is_right)], device=device)
        self._open.allreduce([vote], dist.AllreduceOptions()).wait()
        # On a GPU this also waits for the stream: then all bytes are there.
        return vote.item() == self.member.world_size

    def close(self) -> None:
        self._group = None

    @abstractmethod
    def interrupt(self) -> None: ...

    @property
    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise WeightUpdateError(f"{self.member.group_id} was left")
        return self._group


class GlooTransport(_ProcessGroup):
    """Between CPUs. Gloo closes its connections when the object goes, and not before; what hangs
    in it ends with the others' connections, or with the time limit."""

    def _make(self, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.member.address)]
        return dist.ProcessGroupGloo(store, self.member.rank, self.member.world_size, options)

    def interrupt(self) -> None:
        pass


class NcclTransport(_ProcessGroup):
    """Between GPUs."""

    def _make(self, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
        # Waits then block the waiting thread up to the time limit and raise; otherwise they
        # only order streams, and past the limit a watchdog takes the whole process down.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, self.member.rank, self.member.world_size, options)

    def close(self) -> None:
        self.interrupt()
        super().close()

    def interrupt(self) -> None:
        group = self._group
        if group is not None:
            group.abort()


def _wait_for_all(store: dist.Store, member: GroupMember) -> None:
    """Without this a group's own start would wait for a member that died, to the time limit."""
    store.set(f"here-{member.rank}", "")
    everybody = [f"here-{rank}" for rank in range(member.world_size)]
    deadline = time.monotonic() + member.timeout_s
    while True:
        # First: who has left since is still on the list.
        if store.check([CALLED_OFF]):
            raise WeightUpdateError(f"{member.group_id} was called off: not everybody came")
        if store.check(everybody):
            return
        if time.monotonic() > deadline:
            raise WeightUpdateError(
                f"not everybody came to {member.group_id} within {member.timeout_s:g} s"
            )
        time.sleep(MEET_POLL_S)
