"""From names in the config, and objects of the user's, to trackers; refused here if they can't be
used, before anything starts."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence

import msgspec

from areal_ray.errors import ConfigError, PluginError, described
from areal_ray.observability.tracking import NamedTracker, Tracker
from areal_ray.plugins import load_function

KEY = "observability.trackers"


class _Included(msgspec.Struct, frozen=True):
    """One that comes with areal_ray, in a module that imports what it writes to."""

    product: str
    class_name: str


INCLUDED = {
    "tensorboard": _Included("TensorBoard", "TensorBoardTracker"),
    "wandb": _Included("Weights & Biases", "WandbTracker"),
    "mlflow": _Included("MLflow", "MlflowTracker"),
}


def load_trackers(specs: Sequence[str], given: Sequence[Tracker] = ()) -> list[NamedTracker]:
    """`specs`: as in the config. `given`: objects that the caller brings."""
    for number, spec in enumerate(specs):
        if spec in specs[:number]:
            raise ConfigError(f"{KEY}: `{spec}` is given twice")
    named = [NamedTracker(spec, _load(spec)) for spec in specs]
    for tracker in given:
        _refuse_what_is_none(tracker, "trackers")
        named.append(NamedTracker(type(tracker).__name__, tracker))
    return named


def _load(spec: str) -> Tracker:
    if spec in INCLUDED:
        return _included(spec)
    if ":" not in spec:
        close = difflib.get_close_matches(spec, INCLUDED, n=1)
        meant = f"; did you mean `{close[0]}`?" if close else ""
        raise ConfigError(
            f"{KEY}: expected {', '.join(INCLUDED)} or file.py:name, got `{spec}`{meant}"
        )
    return _made_by(load_function(spec), spec)


def _included(name: str) -> Tracker:
    included = INCLUDED[name]
    try:
        module = importlib.import_module(f"{__package__}.{name}")
        return getattr(module, included.class_name)()
    except ImportError as error:
        raise ConfigError(
            f'{KEY}: {included.product} is not installed; `pip install "areal_ray[{name}]"` '
            f"installs it ({error})"
        ) from error


def _made_by(factory: Callable[..., object], spec: str) -> Tracker:
    try:
        tracker = factory()
    except Exception as error:
        raise PluginError(
            f"{KEY}: {spec} is called without arguments, and raised {described(error)}"
        ) from error
    _refuse_what_is_none(tracker, f"{KEY}: {spec}")
    return tracker


def _refuse_what_is_none(tracker: object, where: str) -> None:
    if isinstance(tracker, type):
        raise ConfigError(f"{where}: expected a tracker, got the class {tracker.__name__}")
    missing = [
        f"`{method}`"
        for method in ("open", "log", "close")
        if not callable(getattr(tracker, method, None))
    ]
    if missing:
        raise ConfigError(
            f"{where}: expected a tracker, got a {type(tracker).__name__}, which has no "
            f"{', no '.join(missing)}"
        )
