"""The actors of one run: made together, started side by side, closed together.

All of them belong to the driver, so that none outlives it and none dies with another. Ray brings
back the process of one that dies: engines and workers are then started anew by the controller,
the queue is reopened by it, and the controller itself is attached again from here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray import logs
from areal_ray.actors.calls import ASK_TIMEOUT_S, ON_ITS_WAY_BACK, until_back
from areal_ray.actors.checkpoint_engine import CheckpointEngineManager, UpdateReport
from areal_ray.actors.checkpointing import Checkpointing
from areal_ray.actors.crew_specs import (
    Task,
    controller_spec,
    engine_name,
    engine_spec,
    manager_spec,
    monitor_spec,
    trainer_spec,
    update_timeout_s,
    window_of,
    worker_spec,
)
from areal_ray.actors.generation import GenerationActor
from areal_ray.actors.orders import obey
from areal_ray.actors.rehearsal import PacedTrainer, Rehearsal
from areal_ray.actors.rollout_controller import Evaluation, RolloutController, RolloutStatus
from areal_ray.actors.rollout_worker import RolloutWorker
from areal_ray.actors.run_monitor import RunMonitor
from areal_ray.actors.telemetry import MonitorAddress, Telemetry
from areal_ray.actors.trainer import TrainerActor, TrainReport
from areal_ray.actors.trainer_calls import TrainerCalls
from areal_ray.actors.trainer_rank import TrainerRank
from areal_ray.actors.trajectory_queue import QueueStatus, TrajectoryQueue
from areal_ray.actors.try_outs import TryOuts
from areal_ray.checkpoints import Checkpoint
from areal_ray.config import Config
from areal_ray.deadlines import within
from areal_ray.errors import PlacementError
from areal_ray.observability.actor_report import RunFacts
from areal_ray.placement import Reservation, Slot, engine_plan, reserve
from areal_ray.types import Prompt, WeightVersion
from areal_ray.weights.transaction import LostEngine

CLOSE_TIMEOUT_S = 10.0
"""For each of the two rounds in which actors are asked to let go: then they are ended."""
NAMESPACE = "areal_ray/"
"""How the namespaces of runs begin: actors of one run don't see those of another."""
MONITOR = "monitor"
MAX_CONTROL_RESTARTS = 16
"""Of the controller and of the queue, each: beyond that, something kills them on purpose."""


@dataclass(frozen=True)
class _Engine:
    handle: ActorHandle
    seat: Reservation | None
    """Its own place in the cluster, if it joined later."""


class Crew:
    def __init__(
        self,
        config: Config,
        task: Task,
        *,
        model_path: str,
        run_dir: Path,
        seats: Reservation,
        rehearsal: Rehearsal | None = None,
        resumed: Checkpoint | None = None,
    ) -> None:
        """Make the actors. None of them does anything yet. `resumed`: what they take up again."""
        self._config = config
        self._resumed = resumed
        self._rehearsal = rehearsal
        self._task = task
        self._model_path = model_path
        self._prompts: ray.ObjectRef | None = None
        self._has_started = False
        self._engines_made = 0
        self._engines: dict[str, _Engine] = {}
        self._resizing = asyncio.Lock()
        rollout = config.rollout
        # A name that tells the runs of a cluster apart; a namespace that no other run has.
        self._run = run_dir.name
        self._namespace = f"{NAMESPACE}{self._run}/{uuid.uuid4().hex[:8]}"
        self.monitor: ActorHandle | None = None
        self._monitor_address: MonitorAddress | None = None
        if config.observability.telemetry:
            self._monitor_address = MonitorAddress(f"{self._run}/{MONITOR}", self._namespace)
            self.monitor = RunMonitor.options(
                **self._named(MONITOR), num_cpus=0, max_restarts=MAX_CONTROL_RESTARTS
            ).remote(monitor_spec(config, run_dir))
        self.phase = "starting"
        """What the run is at, in its own words."""
        self.telemetry = Telemetry(
            "run",
            monitor=self._monitor_address,
            facts=lambda: RunFacts(phase=self.phase),
            shown=lambda: f"Run[{self._run}: {self.phase}]",
        )
        self.queue = TrajectoryQueue.options(
            **self._named("queue"),
            num_cpus=0,
            max_concurrency=self._calls_at_once,
            max_restarts=MAX_CONTROL_RESTARTS,
        ).remote(
            batch=config.trainer.groups_per_step,
            # One batch in training and as many as may wait: the ledger's bound, kept here too.
            max_groups=(rollout.max_staleness + 2) * config.trainer.groups_per_step,
            max_bytes=int(rollout.max_queue_gib * 2**30),
            max_staleness=rollout.max_staleness,
            window=window_of(rollout),
            monitor=self._monitor_address,
        )
        first, *others = seats.slots("trainer")
        trainer = TrainerActor if rehearsal is None else PacedTrainer
        # None, if there is nothing that it could go on from. How often it may, the session counts.
        max_restarts = -1 if config.checkpoint.every else 0
        self.trainer = trainer.options(
            **self._named("trainer"), max_restarts=max_restarts, **vars(first)
        ).remote(self._monitor_address)
        self._other_ranks = [
            TrainerRank.options(
                **self._named(name), max_restarts=max_restarts, **vars(slot)
            ).remote(name, self._monitor_address)
            for name, slot in ((f"trainer-{rank}", slot) for rank, slot in enumerate(others, 1))
        ]
        self.manager = CheckpointEngineManager.options(**self._named("manager"), num_cpus=0).remote(
            self.trainer, manager_spec(config), self._monitor_address
        )
        told = rehearsal or trainer_spec(config, model_path)
        self._trainer_calls = TrainerCalls(
            config,
            self.trainer,
            self.manager,
            other_ranks=self._other_ranks,
            tell=lambda start: self.trainer.start.remote(
                told, self.queue, str(run_dir), start, self._other_ranks
            ),
            shared_gpus=self._shared_gpus,
            tell_lost=self._tell_lost,
        )
        self._workers = {
            name: RolloutWorker.options(
                **self._named(name),
                num_cpus=0,
                max_concurrency=self._calls_at_once,
                max_restarts=-1,
            ).remote(name, self._monitor_address)
            for name in (f"worker-{index}" for index in range(rollout.workers))
        }
        self.controller = RolloutController.options(
            **self._named("controller"),
            num_cpus=0,
            max_concurrency=self._calls_at_once,
            max_restarts=MAX_CONTROL_RESTARTS,
        ).remote(controller_spec(config, run_dir), self._monitor_address)
        self.checkpointing = Checkpointing(
            config,
            run_dir,
            controller=self.controller,
            queue=self.queue,
            trainer=self.trainer,
            trainer_calls=self._trainer_calls,
        )
        self.try_outs = TryOuts(
            config, controller=self.controller, workers=self._workers, queue=self.queue
        )
        # Last: Ray starts processes one after the other, and there may be many of these.
        for slot in seats.slots("engine"):
            self._make_engine(slot, None)

    @property
    def run_name(self) -> str:
        """No other run in its directory has it."""
        return self._run

    @property
    def monitor_address(self) -> MonitorAddress | None:
        """None without `observability.telemetry`."""
        return self._monitor_address

    @property
    def workers(self) -> dict[str, ActorHandle]:
        return dict(self._workers)

    @property
    def engines(self) -> dict[str, ActorHandle]:
        return {name: engine.handle for name, engine in self._engines.items()}

    async def start(
        self, say: Callable[[str], None] = lambda _: None, *, paused: bool = False
    ) -> None:
        """Engines, workers and trainer side by side (the trainer with its supervised phase);
        then the engines get its weights, and rollout begins, unless it is `paused`. `say` hears
        what is done."""
        self.telemetry.start()
        self._prompts = await asyncio.to_thread(ray.put, self._task.prompts)
        if self._resumed is not None:
            await self.checkpointing.take_up_rollouts(self._resumed)
        await self._attach()
        if paused:
            await self.try_outs.pause()
        # A start that fails ends the wait for the others.
        watching = asyncio.ensure_future(self.watch())
        starting = asyncio.ensure_future(self._start(say))
        try:
            await asyncio.wait({watching, starting}, return_when=asyncio.FIRST_COMPLETED)
            await (watching if watching.done() else starting)
        finally:
            watching.cancel()
            starting.cancel()
            await asyncio.gather(watching, starting, return_exceptions=True)

    async def update_weights(
        self, version: WeightVersion, *, recovered: bool = False
    ) -> UpdateReport:
        """Carry the trainer's weights to every engine, then let the controller know: also whether
        they are of a trainer that went on from a checkpoint."""
        named = self.manager.update_weights.options(name=f"weight update v{version}")
        with self.telemetry.span("weight update", f"v{version}"):
            report = await within(
                update_timeout_s(self._config),
                named.remote(version),
                who="the checkpoint engine manager",
                doing=f"weight update {version}",
            )
        await self._ask_controller(
            lambda: self.controller.commit_version.remote(version, report.outcome.lost, recovered)
        )
        return report

    async def note_version(self, version: WeightVersion) -> None:
        """The trainer's weights are of this version, though no engine needs them any more."""
        await self._ask_controller(lambda: self.controller.commit_version.remote(version, []))

    async def train_step(self, step: int, version: WeightVersion) -> TrainReport:
        """Learn from the next batch that is fresh enough at this version: while the engines go on
        or, where they share devices with the trainer, while they rest."""
        with self.telemetry.span("step", f"step {step}"):
            return await self._trainer_calls.step(step, version)

    async def recover_trainer(self, version: WeightVersion) -> Checkpoint:
        """It died: it takes up the last checkpoint, and its weights, which are others than those
        that serve, become `version` everywhere."""
        await self._trainer_calls.until_there()
        checkpoint = await asyncio.to_thread(self.checkpointing.store.latest)
        async with self._trainer_calls.turn():
            await self._trainer_calls.start(checkpoint.directory, version)
        await self.update_weights(version, recovered=True)
        return checkpoint

    async def resize(self, engines: int) -> None:
        """Grow or shrink the pool to so many engines, while it works: a new one takes work once
        it has the current weights, and one that leaves finishes what it has."""
        if engines < self._config.generation.min_engines:
            raise PlacementError(
                f"expected at least generation.min_engines "
                f"({self._config.generation.min_engines}) engines, got {engines}"
            )
        async with self._resizing:
            while len(self._engines) > engines:
                await self._dismiss(next(reversed(self._engines)))
            while len(self._engines) < engines:
                seat = await reserve(engine_plan(self._config, device=self._config.device))
                self._make_engine(seat.slots("engine")[0], seat)
            await self._attach()
            await self._ask_controller(
                self.controller.until_engines_settled.remote,
                timeout_s=self._config.generation.startup_timeout_s,
            )

    async def equip(self, task: Task) -> None:
        """Go by this workflow, reward and filter from now on; rollout is paused meanwhile."""
        await self.try_outs.equip(worker_spec(self._config, task, self._model_path))
        self._task = task

    async def restart_rollout(self) -> None:
        """After an error that ended it: go on from the journal, paused if it was."""
        await self.try_outs.end_controller()
        await self._attach()

    async def status(self) -> tuple[RolloutStatus, QueueStatus]:
        return tuple(
            await asyncio.gather(
                self._ask_controller(self.controller.status.remote),
                until_back(
                    ASK_TIMEOUT_S,
                    self.queue.status.remote,
                    who="the trajectory queue",
                    doing="its status",
                ),
            )
        )

    async def trained(self, group_ids: Sequence[int]) -> None:
        await self._ask_controller(lambda: self.controller.trained.remote(group_ids))

    async def evaluate(self, prompts: Sequence[Prompt]) -> Evaluation:
        """Greedy answers to `prompts`; begun anew if the controller is restarted meanwhile."""
        named = self.controller.evaluate.options(name="evaluation")
        with self.telemetry.span("evaluation"):
            return await until_back(
                self._config.evaluation.timeout_s,
                lambda: named.remote(prompts),
                who="the engines",
                doing="an evaluation (evaluation.timeout_s)",
            )

    async def obey(self, say: Callable[[str], None]) -> None:
        """Do what is asked from outside, for as long as anybody can ask."""
        await obey(self, say)

    async def pause(self) -> None:
        """Begin no new groups; those that run go on, and are taken. The trainer may wait."""
        self._trainer_calls.note_pause(True)
        await self.try_outs.pause()

    async def resume(self) -> None:
        await self.try_outs.resume()
        self._trainer_calls.note_pause(False)

    async def watch(self) -> None:
        """Wait until something ends the run, and raise it. A controller that was restarted is
        told again what there is."""
        while True:
            try:
                await self.controller.watch.remote()
            except ON_ITS_WAY_BACK:
                logs.warning("the controller was restarted, and goes on from its journal")
                await self._attach()

    async def stop_rollout(self) -> None:
        """No new groups, and nobody waits for a batch any more."""
        await self._ask_controller(self.controller.close.remote)
        await self.queue.close.remote()

    async def __aenter__(self) -> Crew:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; or, when it was cancelled and so is to end at once, kill."""
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            self.kill()
        else:
            await self.close()

    async def close(self) -> None:
        """Ask all to let go of what they hold; then end them, whether they did or not."""
        # First, or it would mend what is being taken apart.
        await self._close(self.controller.close.remote())
        await self.telemetry.close()
        try:
            await self._close(
                *(engine.close.remote() for engine in self.engines.values()),
                *(worker.close.remote() for worker in self._workers.values()),
                self.trainer.close.remote(),
            )
            if self.monitor is not None:  # last: it hears the others' last words
                await self._close(self.monitor.close.remote())
        finally:
            self.kill()

    def kill(self) -> None:
        others = [self.controller, self.manager, self.trainer, self.queue]
        if self.monitor is not None:
            others.append(self.monitor)
        for actor in (*others, *self._other_ranks, *self.engines.values(), *self._workers.values()):
            ray.kill(actor)
        for engine in self._engines.values():
            if engine.seat is not None:
                engine.seat.release()

    async def _close(self, *calls: Awaitable[object]) -> None:
        outcomes = await asyncio.gather(
            *(
                within(CLOSE_TIMEOUT_S, call, who="an actor", doing="its shutdown")
                for call in calls
            ),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                logs.debug("while closing: {}", outcome)

    @property
    def _calls_at_once(self) -> int:
        """Each group in flight may need a second call to its worker, the queue's for the finished
        group; and a probe or a commit must not wait behind all of them."""
        return 1024 + 2 * self._config.rollout.max_concurrent_groups

    def _named(self, name: str) -> dict[str, str]:
        return {"name": f"{self._run}/{name}", "namespace": self._namespace}

    def _make_engine(self, slot: Slot, seat: Reservation | None) -> None:
        index, self._engines_made = self._engines_made, self._engines_made + 1
        name = engine_name(index)
        if self._rehearsal is None:
            spec = engine_spec(self._config, index, self._model_path)
        else:
            spec = msgspec.structs.replace(self._rehearsal.engine, name=name)
        handle = GenerationActor.options(
            **self._named(name),
            max_concurrency=self._calls_at_once,
            max_restarts=-1,
            **vars(slot),
        ).remote(spec, self._monitor_address)
        self._engines[name] = _Engine(handle, seat)

    async def _dismiss(self, name: str) -> None:
        """Drain an engine, then end it."""
        await self._ask_controller(
            lambda: self.controller.dismiss_engine.remote(name),
            timeout_s=self._config.generation.request_timeout_s,
        )
        engine = self._engines.pop(name)
        await self._close(engine.handle.close.remote())
        await asyncio.to_thread(ray.kill, engine.handle)
        if engine.seat is not None:
            await asyncio.to_thread(engine.seat.release)
        if self.monitor is not None:
            await self._close(self.monitor.forget.remote(name))

    async def _attach(self) -> None:
        """Tell the controller all that there is: from the beginning, if it dies meanwhile."""

        async def tell() -> None:
            await self.controller.attach.remote(self._prompts, self.queue, self.trainer)
            await self.controller.keep.remote(
                list(self.engines.items()),
                list(self._workers.items()),
                worker_spec(self._config, self._task, self._model_path),
                self.manager,
            )
            if self._has_started:
                await self.controller.start.remote()

        await self._ask_controller(tell, timeout_s=self._config.generation.startup_timeout_s)

    async def _start(self, say: Callable[[str], None]) -> None:
        async with self._trainer_calls.turn():
            await self._start_trainer(say)
        self._has_started = True
        await self._ask_controller(self.controller.start.remote)
        await self._ask_controller(
            self.controller.until_engines_settled.remote,
            timeout_s=self._config.generation.startup_timeout_s,
        )
        say(f"{len(self._engines)} engines serve")

    async def _start_trainer(self, say: Callable[[str], None]) -> None:
        resumed, warmup = self._resumed, self._config.warmup
        if resumed is not None:
            await self._trainer_calls.start(resumed.directory, resumed.manifest.version)
            say(f"the trainer is up, as it was after step {resumed.step}")
            return
        await self._trainer_calls.start(None, 0)
        say("the trainer is up")
        if warmup.steps:
            loss = await self._trainer_calls.warm_up(self._task.demonstrations, warmup)
            say(f"{warmup.steps} supervised steps done, loss {loss:.3f}")

    async def _shared_gpus(self) -> list[str] | None:
        """None if the trainer has its own."""
        generation = self._config.generation
        if not generation.colocated or self._config.device == "cpu":
            return None
        return await within(
            generation.startup_timeout_s,
            self.engines[engine_name(0)].gpus.remote(),
            who=engine_name(0),
            doing="telling its GPUs",
        )

    async def _tell_lost(self, lost: Sequence[LostEngine]) -> None:
        await self._ask_controller(lambda: self.controller.engines_lost.remote(lost))

    async def _ask_controller(
        self, call: Callable[[], Awaitable[object]], *, timeout_s: float = ASK_TIMEOUT_S
    ) -> object:
        return await until_back(timeout_s, call, who="the controller", doing="answering")
