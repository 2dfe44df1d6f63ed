"""Why vLLM's engine process died, from the only place that says so: this process's own log.

The engine tells its clients no more than "see stack trace (above)"; the stack trace goes to the
output that it inherits from us.
"""

from __future__ import annotations

import os
import re

TAIL_BYTES = 256 * 1024

_FROM_ENGINE = re.compile(r"^\(EngineCore[^)]*\) ERROR [^\]]*\] (.*)$")
_NAMES_AN_ERROR = re.compile(r"^[\w.]+(Error|Exception|Exit|Interrupt)\b")


def last_engine_error() -> str:
    """The last error that an engine process wrote here, or nothing. Blocks: a file is read."""
    path = os.path.realpath("/proc/self/fd/1")
    return _last_error_in(path) if os.path.isfile(path) else ""


def _last_error_in(path: str) -> str:
    with open(path, "rb") as log:
        log.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    texts = [match.group(1) for line in lines if (match := _FROM_ENGINE.match(line))]
    errors = [text for text in texts if _NAMES_AN_ERROR.match(text)]
    return errors[-1] if errors else ""
