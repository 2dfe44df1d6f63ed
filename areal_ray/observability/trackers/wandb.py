"""Weights & Biases. Its own settings (WANDB_MODE, WANDB_ENTITY, WANDB_BASE_URL ...) hold."""

from __future__ import annotations

import secrets

import msgspec
import wandb

from areal_ray import logs
from areal_ray.errors import ConfigError, described
from areal_ray.observability.records import Record
from areal_ray.observability.trackers.identity import keep_id, kept_id
from areal_ray.observability.trackers.threads import CLOSE_TIMEOUT_S
from areal_ray.observability.tracking import (
    RunStatus,
    TrackedRun,
    run_status,
    scalars,
    written_at,
)

EXIT_CODES: dict[RunStatus, int] = {"finished": 0, "killed": 255, "failed": 1}

WITHOUT_A_LOGIN = ("offline", "dryrun", "disabled")


class WandbTracker:
    def __init__(self) -> None:
        """Log in now, where somebody can still be asked for a key: later, a live view is drawn over
        the question."""
        if wandb.setup().settings.mode in WITHOUT_A_LOGIN:
            return
        try:
            wandb.login(verify=False)  # a server that is away is no reason to refuse a run
        except wandb.Error as error:
            raise ConfigError(
                f"observability.trackers: wandb can't log in: {error}; expected a login (`wandb "
                "login`, or WANDB_API_KEY), or WANDB_MODE=offline"
            ) from error

    def open(self, run: TrackedRun) -> None:
        run_id = kept_id(run, "wandb")
        if run_id is None:
            run_id = f"{run.name[:64]}-{secrets.token_hex(4)}"
            keep_id(run, "wandb", run_id)
        self._run = wandb.init(
            project=run.config.observability.project,
            id=run_id,
            name=run.name,
            dir=str(run.directory),
            resume="allow",
            # Nested, as it is: W&B itself shows and groups by `trainer.lr`.
            config=msgspec.to_builtins(run.config),
            # Beside whatever run of his own the user has in this process.
            reinit="create_new",
            settings=wandb.Settings(
                # The live view is drawn on the same terminal.
                console="off",
                silent=True,
                # Without limits W&B holds up the end of the process while nobody answers: 70 s
                # after a short run's, with a server that could not be reached.
                init_timeout=CLOSE_TIMEOUT_S,
                finish_timeout=0.75 * CLOSE_TIMEOUT_S,
                finish_timeout_raises=True,
            ),
        )
        # W&B's own step can only grow, and it drops what comes with an older one: an evaluation
        # that ends after later steps, or all that is done again after a resume.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            logs.debug("Weights & Biases: {}", self._run.url)

    def log(self, record: Record) -> None:
        axes = {
            "step": record.step,
            "seconds": record.seconds,
            "_timestamp": written_at(record),
        }
        self._run.log(scalars(record) | axes)

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            self._run.summary["ended by"] = described(error)
        self._run.finish(exit_code=EXIT_CODES[run_status(error)])
