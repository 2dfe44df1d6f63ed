"""TensorBoard: event files in the run's directory, so that `tensorboard --logdir runs` shows every
run by its name."""

from __future__ import annotations

import time

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from areal_ray.errors import described
from areal_ray.observability.records import Record
from areal_ray.observability.tracking import (
    RunStatus,
    TrackedRun,
    hyperparameters,
    run_status,
    scalars,
    written_at,
)

COMPARED = {"reward": 0.0, "evaluation/reward": 0.0}
"""The metrics that stand beside the hyper-parameters; of the values, only the names are used."""

STATUSES: dict[RunStatus, Status] = {
    "finished": Status.STATUS_SUCCESS,
    "killed": Status.STATUS_UNKNOWN,
    "failed": Status.STATUS_FAILURE,
}


class TensorBoardTracker:
    def open(self, run: TrackedRun) -> None:
        # Steps from this one on, of the time before, are not shown any more.
        purge_step = None if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(str(run.directory), purge_step=purge_step)
        experiment, session_start, _ = hparams(hyperparameters(run.config), COMPARED)
        self._writer.file_writer.add_summary(experiment)
        self._writer.file_writer.add_summary(session_start)
        self._writer.flush()

    def log(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=written_at(record))
        self._writer.flush()

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            self._writer.add_text("ended by", described(error))
        self._writer.file_writer.add_summary(_session_end(run_status(error)))
        self._writer.close()


def _session_end(status: RunStatus) -> Summary:
    info = SessionEndInfo(status=STATUSES[status], end_time_secs=time.time())
    about = metadata.create_summary_metadata(HParamsPluginData(session_end_info=info))
    return Summary(value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about)])
