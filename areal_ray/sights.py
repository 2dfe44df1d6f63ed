"""What can be seen of a run: live at a local address and from other shells, and what stays of it.

Nothing here may hold up or end a run: what fails is told, and the run goes on without it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from areal_ray import logs
from areal_ray.config import Config
from areal_ray.errors import described
from areal_ray.observability.chrome_trace import write_trace
from areal_ray.observability.ending import RunEnd, write_end
from areal_ray.observability.report import LiveReport, write_report
from areal_ray.run_address import RunAddress, publish, withdraw

if TYPE_CHECKING:
    from areal_ray.actors.crew import Crew

TRACE = "trace.json"


class Sights:
    def __init__(self, config: Config, directory: Path) -> None:
        self._config = config.observability
        self._directory = directory
        self._live: LiveReport | None = None
        self.report_url = ""

    async def show(self, crew: Crew, ray_address: str) -> None:
        """From now on others can find the run, by its directory, and see how it does."""
        try:
            if self._config.live_report:
                self._live = LiveReport(self._directory)
                self.report_url = await asyncio.to_thread(self._live.start)
            if (at := crew.monitor_address) is not None:
                address = RunAddress(ray_address, at.name, at.namespace, self.report_url)
                await asyncio.to_thread(publish, self._directory, address)
        except OSError as error:
            logs.warning("the run can't be seen from outside: {}", described(error))

    async def __aenter__(self) -> Sights:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(withdraw, self._directory)
        if self._live is not None:
            await asyncio.to_thread(self._live.close)


async def keep_trace(crew: Crew, directory: Path) -> None:
    """Once the crew is closed."""
    try:
        if crew.last_spans:
            await asyncio.to_thread(write_trace, directory / TRACE, crew.last_spans)
    except Exception as error:  # noqa: BLE001 - the run's end must not depend on it
        logs.warning("the trace was not written: {}", described(error))


def leave_report(directory: Path, how: str, error: BaseException | None = None) -> None:
    """How the run ended, and its report. Blocks: call it off the event loop."""
    cause = "" if error is None else described(error)
    try:
        write_end(directory, RunEnd(how, time.time(), cause))
        write_report(directory)
    except Exception as error:  # noqa: BLE001 - the run is over: its outcome is what counts
        logs.warning("the report was not written: {}", described(error))
