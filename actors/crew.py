"""The actors of one run as its driver has them: started side by side, asked, closed together.

All of them belong to the driver, so that none outlives it and none dies with another. Ray brings
back the process of one that dies: engines and workers are then started anew by the controller,
the queue is reopened by it, and the controller itself is attached again from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import ray
from ray.actor import ActorHandle

from areal_ray import logs
from areal_ray.actors.calls import ASK_TIMEOUT_S, ON_ITS_WAY_BACK, until_back
from areal_ray.actors.checkpoint_engine import UpdateReport
from areal_ray.actors.checkpointing import Checkpointing
from areal_ray.actors.crew_members import CrewMembers
from areal_ray.actors.crew_specs import (
    Task,
    engine_name,
    trainer_spec,
    update_timeout_s,
    worker_spec,
)
from areal_ray.actors.orders import obey
from areal_ray.actors.rehearsal import Rehearsal
from areal_ray.actors.rollout_controller import Evaluation, RolloutStatus
from areal_ray.actors.telemetry import MonitorAddress, Telemetry
from areal_ray.actors.trainer import TrainReport
from areal_ray.actors.trainer_calls import TrainerCalls
from areal_ray.actors.trajectory_queue import QueueStatus
from areal_ray.actors.try_outs import TryOuts
from areal_ray.checkpoints import Checkpoint
from areal_ray.config import Config
from areal_ray.deadlines import within
from areal_ray.errors import PlacementError
from areal_ray.observability.actor_report import RunFacts
from areal_ray.observability.run_status import ActorSpans
from areal_ray.placement import Reservation, engine_plan, reserve
from areal_ray.types import Prompt, WeightVersion
from areal_ray.weights.transaction import LostEngine


class Crew:
    def __init__(
        self,
        config: Config,
        task: Task,
        *,
        model_path: str,
        packed_tokenizer: bytes,
        run_dir: Path,
        seats: Reservation,
        rehearsal: Rehearsal | None = None,
        resumed: Checkpoint | None = None,
    ) -> None:
        """Make the actors. None of them does anything yet. `resumed`: what they take up again."""
        self._config = config
        self._resumed = resumed
        self._task = task
        self._packed_tokenizer = packed_tokenizer
        self._prompts: ray.ObjectRef | None = None
        self._has_started = False
        self._resizing = asyncio.Lock()
        members = self._members = CrewMembers(
            config, model_path=model_path, run_dir=run_dir, seats=seats, rehearsal=rehearsal
        )
        self.controller, self.queue = members.controller, members.queue
        self.trainer, self.manager = members.trainer, members.manager
        self.monitor = members.monitor
        self.phase = "starting"
        """What the run is at, in its own words."""
        self.last_spans: list[ActorSpans] = []
        """What each has done at the end, once all are closed."""
        self.telemetry = Telemetry(
            "run",
            monitor=members.monitor_address,
            facts=lambda: RunFacts(phase=self.phase),
            shown=lambda: f"Run[{members.run}: {self.phase}]",
        )
        told = rehearsal or trainer_spec(config, model_path)
        self._trainer_calls = TrainerCalls(
            config,
            self.trainer,
            self.manager,
            other_ranks=members.other_ranks,
            tell=lambda start: self.trainer.start.remote(
                told, self.queue, str(run_dir), start, members.other_ranks
            ),
            shared_gpus=self._shared_gpus,
            tell_lost=self._tell_lost,
        )
        self.checkpointing = Checkpointing(
            config,
            run_dir,
            controller=self.controller,
            queue=self.queue,
            trainer=self.trainer,
            trainer_calls=self._trainer_calls,
        )
        self.try_outs = TryOuts(
            config, controller=self.controller, workers=members.workers, queue=self.queue
        )

    @property
    def monitor_address(self) -> MonitorAddress | None:
        """None without `observability.telemetry`."""
        return self._members.monitor_address

    @property
    def workers(self) -> dict[str, ActorHandle]:
        return dict(self._members.workers)

    @property
    def engines(self) -> dict[str, ActorHandle]:
        return self._members.engines

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
        name = f"CheckpointEngineManager: weight update v{version}"
        named = self.manager.update_weights.options(name=name)
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
            while len(self.engines) > engines:
                await self._dismiss(next(reversed(self.engines)))
            while len(self.engines) < engines:
                seat = await reserve(engine_plan(self._config, device=self._config.device))
                self._members.add_engine(seat.slots("engine")[0], seat)
            await self._attach()
            await self._ask_controller(
                self.controller.until_engines_settled.remote,
                timeout_s=self._config.generation.startup_timeout_s,
            )

    async def equip(self, task: Task) -> None:
        """Go by this workflow, reward and filter from now on; rollout is paused meanwhile."""
        await self.try_outs.equip(worker_spec(self._config, task, self._packed_tokenizer))
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
        named = self.controller.evaluate.options(name="RolloutController: evaluation")
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
        await self.telemetry.close()
        self.last_spans = await self._members.close()

    def kill(self) -> None:
        self.telemetry.stop()
        self._members.kill()

    async def _dismiss(self, name: str) -> None:
        """Drain an engine, then end it."""
        await self._ask_controller(
            lambda: self.controller.dismiss_engine.remote(name),
            timeout_s=self._config.generation.request_timeout_s,
        )
        await self._members.remove_engine(name)

    async def _attach(self) -> None:
        """Tell the controller all that there is: from the beginning, if it dies meanwhile."""

        async def tell() -> None:
            await self.controller.attach.remote(self._prompts, self.queue, self.trainer)
            await self.controller.keep.remote(
                list(self.engines.items()),
                list(self.workers.items()),
                worker_spec(self._config, self._task, self._packed_tokenizer),
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
        say(f"{len(self.engines)} engines serve")

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
