"""What a weight update costs: the transfer, the pause, and the tokens that are not made meanwhile.

Three measurements on a Qwen2 of 110 million parameters in float32, 440 MB:

- transfer: the trainer's parameters into staging copies in other processes, against one bare
  `torch.distributed.broadcast` of as many bytes between the same processes, turn by turn;
- growth: the same with more and more receiving processes;
- pause: updates of a real vLLM engine with requests in flight, staged and in place: how long
  generation stands still, and tokens/s while update follows update, against none.

The trainer is an actor that sends the same random weights each time; manager, engines and all
between them are the real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import ray
import torch
from common import Figure, local_cluster, resolved, say, show
from engine_load import Load, make_model, new_engine
from ray.actor import ActorHandle

from areal_ray.actors.checkpoint_engine import CheckpointEngineManager, EngineMember, ManagerSpec
from areal_ray.generation.simulated_weights import HeldTensors
from areal_ray.types import WeightVersion
from areal_ray.weights.layout import StreamLayout
from areal_ray.weights.receiver import StagingReceiver
from areal_ray.weights.sender import Sender
from areal_ray.weights.staging import StagingMode, staging_for
from areal_ray.weights.transaction import Limits
from areal_ray.weights.update import GroupMember, SendingPlan, WeightUpdate

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
BUCKET_BYTES = 64 << 20


class Bare:
    """A process's place in a plain torch.distributed world."""

    def __init__(self, port: int, rank: int, world_size: int, total_bytes: int) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=world_size
        )
        self._stream = torch.zeros(total_bytes, dtype=torch.uint8)

    def broadcast(self) -> None:
        torch.distributed.broadcast(self._stream, src=0)
        torch.distributed.barrier()


@ray.remote(num_cpus=0, max_concurrency=8)
class RandomTrainer:
    def __init__(self, model_path: str) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._parameters = [(name, p.detach()) for name, p in model.named_parameters()]
        self._sender: Sender | None = None
        self._version: WeightVersion = 0
        self._bare: Bare | None = None

    async def set_version(self, version: WeightVersion) -> None:
        self._version = version

    async def sending_plan(self, bucket_bytes: int, timeout_s: float, verify: bool) -> SendingPlan:
        self._sender = self._sender or Sender(
            HOST,
            self._parameters,
            dtype=torch.float32,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            verify=verify,
        )
        return self._sender.plan

    async def send_weights(self, member: GroupMember) -> WeightVersion:
        await asyncio.to_thread(self._sender.send, member)
        return self._version

    async def call_off_sending(self, group_id: str) -> None:
        self._sender.call_off(group_id)

    async def join_bare(self, port: int, world_size: int, total_bytes: int) -> None:
        self._bare = await asyncio.to_thread(Bare, port, 0, world_size, total_bytes)

    async def broadcast_bare(self) -> None:
        await asyncio.to_thread(self._bare.broadcast)

    async def leave_bare(self) -> None:
        torch.distributed.destroy_process_group()


@ray.remote(num_cpus=0, max_concurrency=8)
class Receiving:
    """An engine's receiving side, without the engine."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._receiver = StagingReceiver(
            torch.device("cpu"),
            lambda layout: staging_for(HeldTensors(layout, {}), layout, "device", is_shard=False),
        )
        self._bare: Bare | None = None

    async def stage_weights(self, encoded_update: bytes) -> None:
        self._receiver.start(msgspec.msgpack.decode(encoded_update, type=WeightUpdate))

    async def apply(self) -> None:
        await asyncio.to_thread(self._receiver.apply)

    async def join_bare(self, port: int, rank: int, world_size: int, total_bytes: int) -> None:
        self._bare = await asyncio.to_thread(Bare, port, rank, world_size, total_bytes)

    async def broadcast_bare(self) -> None:
        await asyncio.to_thread(self._bare.broadcast)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


async def timed(calls: Callable[[], Sequence[ray.ObjectRef]]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*calls())
    return time.perf_counter() - began


async def measure_transfer(
    trainer: ActorHandle, count: int, rounds: int
) -> tuple[float, float, float]:
    """Seconds of a bare broadcast and of staging, and their ratio: medians over the rounds."""
    plan = await trainer.sending_plan.remote(BUCKET_BYTES, TIMEOUT_S, False)
    total_bytes = StreamLayout(plan.manifest).total_bytes
    engines = [Receiving.remote() for _ in range(count)]
    port = free_port()
    await asyncio.gather(
        trainer.join_bare.remote(port, count + 1, total_bytes),
        *(e.join_bare.remote(port, n, count + 1, total_bytes) for n, e in enumerate(engines, 1)),
    )
    sender = GroupMember(
        HOST, plan.port, HOST, f"transfer-{count}", 0, count + 1, "gloo", TIMEOUT_S
    )
    updates = [
        msgspec.msgpack.encode(
            WeightUpdate(member=msgspec.structs.replace(sender, rank=rank), manifest=plan.manifest)
        )
        for rank in range(1, count + 1)
    ]
    bare_s, staged_s = [], []
    for number in range(rounds + 1):
        bare = await timed(
            lambda: [trainer.broadcast_bare.remote(), *(e.broadcast_bare.remote() for e in engines)]
        )
        staged = await timed(
            lambda: [
                *(e.stage_weights.remote(u) for e, u in zip(engines, updates, strict=True)),
                trainer.send_weights.remote(sender),
            ]
        )
        await asyncio.gather(*(engine.apply.remote() for engine in engines))
        if number:  # the first round meets, and touches its memory for the first time
            bare_s.append(bare)
            staged_s.append(staged)
    await trainer.leave_bare.remote()
    for engine in engines:
        ray.kill(engine)
    ratios = [bare / staged for bare, staged in zip(bare_s, staged_s, strict=True)]
    return statistics.median(bare_s), statistics.median(staged_s), statistics.median(ratios)


class PauseFigures(msgspec.Struct):
    update_s: float
    pause_s: float
    tokens_per_s: float
    tokens_per_s_updating: float
    updates: int


async def measure_pause(
    trainer: ActorHandle, model: Path, staging: StagingMode, *, samples: int, seconds: float
) -> PauseFigures:
    engine = new_engine(
        f"engine-{staging}", model, samples=samples, staging=staging, kv_after_update="keep"
    )
    started = await engine.start.remote()
    manager = CheckpointEngineManager.options(num_cpus=0).remote(
        trainer,
        ManagerSpec(
            backend="gloo",
            bucket_bytes=BUCKET_BYTES,
            verify=False,
            limits=Limits(
                timeout_s=TIMEOUT_S,
                busy_timeout_s=TIMEOUT_S,
                restore_timeout_s=30.0,
                max_failures=1,
            ),
            start_timeout_s=TIMEOUT_S,
        ),
    )
    await manager.sync.remote(
        EngineMember(name="engine", handle=engine, address=HOST, process=started.process, workers=1)
    )
    load = Load(engine, samples)
    await load.until_begun()

    pauses, updates = [], []

    async def update_again_and_again() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            began = time.perf_counter()
            await trainer.set_version.remote(len(updates) + 1)
            report = await manager.update_weights.remote(len(updates) + 1)
            updates.append(time.perf_counter() - began)
            pauses.append(report.outcome.longest_pause_s)
            await asyncio.sleep(2.0)

    undisturbed = await load.rate(lambda: asyncio.sleep(seconds))
    updating = await load.rate(update_again_and_again)
    for actor in (manager, engine):
        ray.kill(actor)
    return PauseFigures(
        update_s=statistics.median(updates[1:]),
        pause_s=statistics.median(pauses[1:]),
        tokens_per_s=undisturbed,
        tokens_per_s_updating=updating,
        updates=len(updates),
    )


async def measure(arguments: argparse.Namespace, model: Path) -> None:
    if arguments.only != "pause":
        await compare_transfers(arguments, model)
    if arguments.only != "transfer":
        await compare_pauses(arguments, model)


async def compare_transfers(arguments: argparse.Namespace, model: Path) -> None:
    figures: dict[str, Figure] = {}
    rows = []
    for count in arguments.receivers:
        say(f"transfer to {count}")
        trainer = RandomTrainer.remote(str(model))
        bare_s, staged_s, ratio = await measure_transfer(trainer, count, arguments.rounds)
        ray.kill(trainer)
        rows.append([str(count), f"{bare_s:.3f}", f"{staged_s:.3f}", f"{ratio:.2f}"])
        figures |= {
            f"bare_s_{count}": bare_s,
            f"staged_s_{count}": staged_s,
            f"transfer_ratio_{count}": ratio,
        }
    show(["receivers", "bare s", "staged s", "bare / staged"], rows, figures)


async def compare_pauses(arguments: argparse.Namespace, model: Path) -> None:
    trainer = RandomTrainer.remote(str(model))
    measured = {}
    for staging in ("none", "device"):
        say(f"pause with staging {staging}")
        measured[staging] = await measure_pause(
            trainer, model, staging, samples=arguments.samples, seconds=arguments.seconds
        )
    rows = [
        [
            "in place" if staging == "none" else "staged",
            f"{1000 * m.pause_s:.0f}",
            f"{m.update_s:.2f}",
            f"{m.tokens_per_s:.1f}",
            f"{m.tokens_per_s_updating:.1f}",
            str(m.updates),
        ]
        for staging, m in measured.items()
    ]
    staged, in_place = measured["device"], measured["none"]
    headings = ["", "pause ms", "update s", "tokens/s", "while updating", "updates"]
    show(
        headings,
        rows,
        {
            "pause_ratio": staged.pause_s / in_place.pause_s,
            "pause_staged_s": staged.pause_s,
            "pause_in_place_s": in_place.pause_s,
            "tokens_ratio_staged": staged.tokens_per_s_updating / staged.tokens_per_s,
            "tokens_ratio_in_place": in_place.tokens_per_s_updating / in_place.tokens_per_s,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=8, help="in flight at the engine")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each window of tokens/s")
    parser.add_argument("--only", choices=["transfer", "pause"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        with local_cluster(resolved({"model": {"path": directory}})):
            asyncio.run(measure(arguments, Path(directory)))


if __name__ == "__main__":
    main()
