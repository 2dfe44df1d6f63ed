"""A trainer that is sharded over two processes by FSDP2 sends whole weights."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import sharded_trainer
import torch

from areal_ray.weights.layout import StreamLayout
from areal_ray.weights.receiver import StagingReceiver
from areal_ray.weights.staging import staging_for
from areal_ray.weights.update import GroupMember, SendingPlan, WeightUpdate


class Held:
    def __init__(self, layout: StreamLayout) -> None:
        self.weights = {
            spec.name: torch.zeros(spec.shape, dtype=spec.torch_dtype)
            for spec in layout.manifest.tensors
        }

    def named_parameters(self):
        return iter(self.weights.items())

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.weights[name].copy_(tensor)


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
        held: list[Held] = []

        def staging(layout: StreamLayout):
            held.append(Held(layout))
            return staging_for(held[0], layout, "device", is_shard=False)

        receiver = StagingReceiver(torch.device("cpu"), staging)
        member = GroupMember(
            "127.0.0.1", plan.port, "127.0.0.1", "sharded", 1, 2, "gloo", sharded_trainer.TIMEOUT_S
        )
        for _ in range(2):
            receiver.start(WeightUpdate(member=member, manifest=plan.manifest, verify=True))
            receiver.apply()
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    expected = dict(sharded_trainer.whole_model().named_parameters())
    assert held[0].weights.keys() == expected.keys()
    for name, tensor in held[0].weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name
