"""User code named in a config: `file.py:name` or `package.module:name`.

`pack` makes bytes of such a function, by value when it came from a file, so that it reaches
actors on machines that do not have the file; `unpack` is its other end.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cloudpickle

from areal_ray.errors import PluginError


def load_function(spec: str) -> Callable[..., object]:
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise PluginError(f"{spec}: expected file.py:function or package.module:function")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place, spec)
    function = getattr(module, name, None)
    if function is None:
        raise PluginError(f"{spec}: {place} has no `{name}`")
    if not callable(function):
        raise PluginError(f"{spec}: `{name}` is a {type(function).__name__}, not a function")
    return function


def pack(function: Callable[..., object]) -> bytes:
    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        raise PluginError(f"{function!r} can't be sent to other processes: {error}") from error


def unpack(packed: bytes) -> Callable[..., object]:
    return cloudpickle.loads(packed)


def users_traceback(error: Exception, *, called_from: str) -> str:
    """Only what happened in the user's code, which was called from that file."""
    told = traceback.TracebackException.from_exception(error)
    ours = [index for index, frame in enumerate(told.stack) if frame.filename == called_from]
    if ours:
        del told.stack[: ours[-1] + 1]
    return "".join(told.format()).strip()


def _import(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PluginError(f"{spec}: {name} can't be imported: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PluginError(f"{path}: no such file")
    path = path.resolve()
    for module in list(sys.modules.values()):
        # The file may be the running script itself: then its functions are already here.
        if getattr(module, "__file__", None) and Path(module.__file__).resolve() == path:
            return module
    name = f"areal_ray_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"{path}: failed while it was loaded: {error!r}") from error
    cloudpickle.register_pickle_by_value(module)
    return module
