"""Every error that areal_ray raises on purpose.

Each one names what was wrong, where, and what would be right; a caller can tell them apart by
type. Whatever is not an `ArealRayError` is a defect.
"""

from __future__ import annotations


class ArealRayError(Exception):
    """The root of areal_ray's own errors."""


class ConfigError(ArealRayError):
    """The configuration is refused. Raised before anything starts."""


class PluginError(ArealRayError):
    """A `file.py:name` or `module:name` in the config does not lead to what it should."""


class NoRun(ArealRayError):
    """A directory that should be a run's is none."""


class DataError(ArealRayError):
    """A prompt source holds something that is not a prompt."""


class ModelError(ArealRayError):
    """A model directory or name can't be used."""


class DeadlineExceeded(ArealRayError):
    """Somebody did not answer in time."""

    def __init__(self, who: str, doing: str, timeout_s: float) -> None:
        super().__init__(who, doing, timeout_s)
        self.who, self.doing, self.timeout_s = who, doing, timeout_s

    def __str__(self) -> str:
        return f"{self.who} did not finish {self.doing} within {self.timeout_s:g} s"


class PlacementError(ArealRayError):
    """The cluster can't hold what the config asks for."""


class EngineError(ArealRayError):
    """A generation engine failed."""


class EngineNotServing(EngineError):
    """An engine was asked that is dead, or not up yet: another can be asked instead."""


class RewardError(ArealRayError):
    """A reward function raised, timed out, or returned something that is no number."""


class WorkflowError(ArealRayError):
    """A workflow gave something that can't be trained on."""


class TrainingError(ArealRayError):
    """An optimizer step can't be taken."""


class WeightUpdateError(ArealRayError):
    """A weight update did not reach every engine."""


class TrainerLost(WeightUpdateError):
    """There is no trainer any more that could send weights."""


class TrainerAway(TrainerLost):
    """The trainer died and may yet come back: until then it can be asked for nothing."""


class WrongVersion(WeightUpdateError):
    """The trainer's weights are not of the version that was asked for."""


class TornWeights(WeightUpdateError):
    """Some weights of an engine are new and some old: it must not generate any more."""


class RestoreError(ArealRayError):
    """What was acquired could not be given back."""


class JournalError(ArealRayError):
    """A journal can't be read or does not belong to this run."""


class CheckpointError(ArealRayError):
    """A checkpoint can't be written, or is not whole."""


class GroupTimedOut(ArealRayError):
    """A group took longer than `rollout.group_timeout_s`."""


class NotReady(ArealRayError):
    """An actor was asked that has just been restarted: ask it again, or ask another."""


class WorkerLost(ArealRayError):
    """A group took one worker after another down with it."""


class FilteredOut(ArealRayError):
    """The user's filter lets nothing through."""


class PoolError(ArealRayError):
    """Too few members of a pool are left to go on."""


class QueueClosed(ArealRayError):
    """The trajectory queue gives no more batches: the run is stopping."""


class Superseded(ArealRayError):
    """The same holder asked the queue for another batch: this call is answered no more."""


class TooManyFailures(ArealRayError):
    """The error budget for rollouts is used up; the first failure is the cause."""


REFUSALS = (CheckpointError, ConfigError, DataError, ModelError, NoRun, PluginError)
"""What a user asked for can't be had: raised before anything starts."""


def root_cause(error: BaseException) -> BaseException:
    """What really happened, under the wrappings that remote calls and groups put around it."""
    while True:
        inner = getattr(error, "cause", None)
        if isinstance(error, BaseExceptionGroup):
            inner = error.exceptions[0]
        if not isinstance(inner, BaseException) or inner is error:
            return error
        error = inner


def described(error: BaseException) -> str:
    """The root cause in a line or two, without a traceback."""
    cause = root_cause(error)
    told = str(cause)
    # Ray lists what it knows, line by line.
    if type(cause).__module__.startswith("ray.") and "Traceback" not in told:
        told = " ".join(told.split())
    return f"{type(cause).__name__}: {told}"
