"""The run's side of its front desk: what `areal-ray pause`, `resume` and `resize` ask is done here,
one after the other, while training goes on. What can't be done is refused, and ends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from ray.exceptions import ActorUnavailableError

from areal_ray import logs
from areal_ray.actors.calls import ASK_TIMEOUT_S, RETRY_EVERY_S, until_back
from areal_ray.commands import Answer, Command, Order, Pause, Resize, Resume
from areal_ray.errors import described

if TYPE_CHECKING:
    from areal_ray.actors.crew import Crew


async def obey(crew: Crew, say: Callable[[str], None]) -> None:
    """For as long as the run has a monitor. `say` hears what was done."""
    if crew.monitor is None:
        return
    try:
        last = -1
        while True:
            order = await _next_order(crew, last)
            last = order.number
            answer = await _answer_to(crew, order.command)
            say(answer.text)
            await until_back(
                ASK_TIMEOUT_S,
                lambda order=order, answer=answer: crew.monitor.answer.remote(order.number, answer),
                who="the monitor",
                doing="taking an answer",
            )
    except Exception as error:  # noqa: BLE001 - a run that nobody can tell anything goes on
        logs.warning("the run can't be told anything from outside any more: {}", described(error))


async def _next_order(crew: Crew, last: int) -> Order:
    """Waits for as long as nobody asks for anything: that has no time limit."""
    while True:
        try:
            return await crew.monitor.next_order.remote(last)
        except ActorUnavailableError:
            await asyncio.sleep(RETRY_EVERY_S)


async def _answer_to(crew: Crew, command: Command) -> Answer:
    try:
        match command:
            case Pause():
                await crew.pause()
                return Answer("paused: no new groups are begun")
            case Resume():
                await crew.resume()
                return Answer("resumed")
            case Resize(engines):
                await crew.resize(engines)
                return Answer(f"{engines} engines")
    except Exception as error:  # noqa: BLE001 - told to who asked; the run goes on
        return Answer(f"{type(command).__name__.lower()}: {described(error)}", is_refusal=True)
