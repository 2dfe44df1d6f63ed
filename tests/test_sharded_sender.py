"""A trainer that is sharded over two processes by FSDP2 sends whole weights."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import sharded_trainer
import torch

from areal_ray.generation.simulated_weights import HeldTensors
from areal_ray.weights.receiver import StagingReceiver
from areal_ray.weights.staging import staging_for
from areal_ray.weights.update import GroupMember, SendingPlan, WeightUpdate


def test_shards_are_gathered_converted_and_sent_whole() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, sharded_trainer.__file__, str(rank), str(port)],
            cwd=Path(sharded_trainer.__file__).parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(sharded_trainer.RANKS)
    ]
    try:
        plan = msgspec.json.decode(ranks[0].stdout.readline(), type=SendingPlan)
        held: dict[str, torch.Tensor] = {}
        receiver = StagingReceiver(
            torch.device("cpu"),
            lambda layout: staging_for(HeldTensors(layout, held), layout, "device", is_shard=False),
        )
        # In between, two sendings fail: one before its first bucket, one after it.
        for group in ("sharded", "again"):
            member = GroupMember(
                "127.0.0.1", plan.port, "127.0.0.1", group, 1, 2, "gloo", sharded_trainer.TIMEOUT_S
            )
            receiver.start(WeightUpdate(member=member, manifest=plan.manifest, verify=True))
            receiver.apply()
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    expected = dict(sharded_trainer.whole_model().named_parameters())
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name
