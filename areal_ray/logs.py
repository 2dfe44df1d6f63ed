"""Logging for the actors.

Ray sends an actor's class to its process by value, with every global that its methods use. A
loguru logger holds open files and can't be sent, least of all from a notebook; this module is
sent by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger


def warning(message: str, *arguments: object) -> None:
    logger.opt(depth=1).warning(message, *arguments)


@contextmanager
def without(module: str) -> Iterator[None]:
    """Meanwhile that module says nothing in this process."""
    logger.disable(module)
    try:
        yield
    finally:
        logger.enable(module)


def debug(message: str, *arguments: object) -> None:
    logger.opt(depth=1).debug(message, *arguments)
