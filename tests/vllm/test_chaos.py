"""Real vLLM, real signals: whatever dies, the run goes on, is right, and ends as it should."""

from __future__ import annotations

import json
import signal
from collections import Counter

from tests.vllm.struck import StruckRun

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, plain or in v6."""


def test_killed_and_wedged_processes_cost_no_group(struck: StruckRun) -> None:
    samples = Counter(
        (record["step"], record["group"])
        for line in (struck.directory / "rollouts.jsonl").read_text().splitlines()
        if (record := json.loads(line))
    )
    groups = Counter(group for _, group in samples)
    assert set(groups.values()) == {1}, "a group was trained on twice"
    steps = struck.steps()
    learnt = Counter(step for step, _ in samples)
    assert learnt.keys() == {step["step"] for step in steps}
    # A trainer that dies with a batch learnt and its weights not sent takes that step along: it is
    # taken again, with another batch.
    again = [step for step, count in learnt.items() if count != 64]
    assert len(again) <= struck.recoveries
    assert all(learnt[step] == 2 * 64 for step in again)
    assert set(samples.values()) == {8}
    assert all(step["groups_failed"] == 0 for step in steps)
    assert steps[-1]["engines"] == 2
    # What the deaths cost: some groups grew too old while an engine was missing, no more.
    assert max(step["staleness_max"] for step in steps) <= 2


def test_a_trainer_of_whom_a_rank_is_killed_goes_on_from_its_checkpoint_at_the_cost_of_a_version(
    struck: StruckRun,
) -> None:
    """The first rank once, and the other."""
    assert struck.recoveries == 2
    steps = struck.steps()
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    versions = [step["version"] for step in steps]
    assert versions == sorted(versions)
    # A second one if it died between learning from a batch and sending its weights.
    assert struck.recoveries <= struck.versions_ahead <= 2 * struck.recoveries
    # While there is an evaluation, the engines are behind by as much as staleness allows.
    assert all(-2 <= step["version"] - step["step"] <= struck.versions_ahead for step in steps)


def test_a_local_cluster_and_all_that_runs_in_it_listen_on_loopback_only(
    struck: StruckRun,
) -> None:
    assert struck.listened_on
    assert struck.listened_on <= LOOPBACK


def test_one_ctrl_c_saves_the_model_and_leaves_nothing_behind(struck: StruckRun) -> None:
    assert struck.exit_code == 128 + signal.SIGINT, struck.output
    assert "areal-ray: stopped after" in struck.output
    assert (struck.directory / "model" / "model.safetensors").is_file()
    assert (struck.directory / "reward.png").is_file()
    assert struck.left_behind == {}
