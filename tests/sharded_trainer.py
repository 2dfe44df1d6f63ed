"""One rank of a trainer that is sharded by FSDP2: `python sharded_trainer.py RANK PORT`."""

from __future__ import annotations

import sys

import msgspec
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from areal_ray.errors import WeightUpdateError
from areal_ray.weights.sender import Sender, gather_along
from areal_ray.weights.transport import Transport, join
from areal_ray.weights.update import GroupMember

RANKS = 2
TIMEOUT_S = 60.0


def whole_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(33, 17), torch.nn.LayerNorm(17), torch.nn.Linear(17, 5, bias=False)
    )


class Breaking:
    """A group that breaks with its second bucket."""

    def __init__(self, member: GroupMember) -> None:
        self.member = member
        self._buckets = 0

    def broadcast(self, buffer: torch.Tensor) -> None:
        self._buckets += 1
        if self._buckets == 2:
            raise WeightUpdateError("an engine hung up")

    def close(self) -> None:
        pass


def join_or_break(member: GroupMember, store: torch.distributed.Store) -> Transport:
    return Breaking(member) if member.group_id == "breaks" else join(member, store)


def main(rank: int, port: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    model = whole_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = list(model.named_parameters())
    assert all(p.to_local().numel() < p.numel() for _, p in parameters), "nothing is sharded"
    if rank == 0:
        sender = Sender(
            "127.0.0.1",
            parameters,
            dtype=torch.bfloat16,
            bucket_bytes=256,
            timeout_s=TIMEOUT_S,
            verify=True,
            join=join_or_break,
        )
        print(msgspec.json.encode(sender.plan).decode(), flush=True)
        member = GroupMember(
            host="127.0.0.1",
            port=sender.plan.port,
            address="127.0.0.1",
            group_id="sharded",
            rank=0,
            world_size=2,
            backend="gloo",
            timeout_s=TIMEOUT_S,
        )
        sender.send(member)
        sender.call_off("called off")
        for group in ("called off", "breaks"):
            try:
                sender.send(msgspec.structs.replace(member, group_id=group))
            except WeightUpdateError:
                continue
            raise AssertionError(f"{group}: expected an error")
        sender.send(msgspec.structs.replace(member, group_id="again"))
    else:
        for _ in range(4):
            gather_along(parameters)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
