"""Who goes first when a machine has more to do than cores.

A controller that waits in the run queue behind sixty engines is late for all of them. So every
process that computes (engines, workers, scorers, the trainer) steps aside a little for those that
only decide: making oneself less important needs no rights, and costs nothing on an idle core.
"""

from __future__ import annotations

import os

STEP = 4


def step_aside() -> None:
    """Let the control plane of this machine go first. What this process starts inherits it."""
    os.nice(STEP)
