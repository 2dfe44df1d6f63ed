"""How much is on its way at once, and how often what is done: from the config alone."""

from __future__ import annotations

from areal_ray.config import Config
from areal_ray.generation.sizing import MAX_SAMPLES, samples_at_once
from areal_ray.planning.figures import Chapter, Figure


def flow(config: Config, *, prompts: int, held_out: int) -> list[Chapter]:
    """`config`: resolved. How many prompts there are to train and to evaluate on."""
    return [_steps(config, prompts), _staleness(config), _milestones(config, held_out)]


def _steps(config: Config, prompts: int) -> Chapter:
    trainer, samples = config.trainer, config.rollout.samples
    groups, answer = trainer.groups_per_step, config.generation.max_new_tokens
    batch, prompt = groups * samples, config.data.max_prompt_tokens
    tokens = batch * (answer + prompt)
    drawn = config.steps * groups
    updates = trainer.epochs * trainer.mini_batches
    return Chapter(
        "A step",
        (
            Figure("batch", groups, "groups", "trainer.groups_per_step"),
            Figure("of", batch, "samples", f"{groups} groups × {samples} (rollout.samples)"),
            Figure(
                "learned tokens",
                batch * answer,
                "at most",
                f"{batch:,} samples × {answer:,} (generation.max_new_tokens)",
            ),
            Figure(
                "tokens",
                tokens,
                "at most",
                f"and {batch:,} prompts of up to {prompt:,} (data.max_prompt_tokens)",
            ),
            Figure(
                "passes",
                -(-tokens // (trainer.micro_batch_tokens * trainer.ranks)),
                "a rank or so",
                f"at most: {tokens:,} tokens / {trainer.micro_batch_tokens:,} "
                f"(trainer.micro_batch_tokens) / {trainer.ranks} (trainer.ranks)",
            ),
            Figure(
                "optimizer steps",
                updates,
                "a batch",
                f"{trainer.epochs} (trainer.epochs) × {trainer.mini_batches} "
                "(trainer.mini_batches)",
            ),
            Figure(
                "of the run",
                drawn,
                "groups",
                f"{config.steps} (steps) × {groups}: each of the {prompts:,} prompts "
                f"{_times(drawn / prompts)}",
            ),
        ),
    )


def _staleness(config: Config) -> Chapter:
    rollout, groups = config.rollout, config.trainer.groups_per_step
    stale, samples = rollout.max_staleness, rollout.samples
    started = (stale + 1) * groups
    at_once = min(rollout.max_concurrent_groups, started)
    engines, each = config.generation.engines, samples_at_once(config)
    in_flight = rollout.max_concurrent_groups * samples
    shared = f"{in_flight:,} samples / {engines} (generation.engines)"
    if each == MAX_SAMPLES:
        shared += f", {MAX_SAMPLES:,} at most; others wait in the engine"
    return Chapter(
        "Staleness",
        (
            Figure("oldest token", stale, "versions old", _meaning(stale)),
            Figure(
                "groups ahead",
                started,
                "at most",
                f"({stale} (rollout.max_staleness) + 1) × {groups} groups of a step: running, or "
                "finished and not trained on",
            ),
            Figure(
                "running at once",
                at_once,
                "groups",
                "rollout.max_concurrent_groups"
                if at_once < started
                else "all that max_staleness lets start",
            ),
            Figure("in an engine", each, "samples", shared),
            Figure(
                "queue",
                (stale + 2) * groups,
                "groups at most",
                f"({stale} + 2) × {groups}: one batch in training, the others waiting; or "
                f"{rollout.max_queue_gib:g} GiB (rollout.max_queue_gib)",
            ),
        ),
    )


def _milestones(config: Config, held_out: int) -> Chapter:
    every, evaluation = config.checkpoint.every, config.evaluation.every
    goal = "" if config.goal is None else f", unless an evaluation reaches {config.goal:g} before"
    figures = [Figure("steps", config.steps, "at most", f"steps{goal}")]
    figures.append(
        Figure(
            "weight updates",
            config.steps,
            "versions",
            "one after each step, all engines at once",
        )
    )
    if held_out:
        points = milestones(config.steps, evaluation)
        figures.append(
            Figure(
                "evaluations",
                len(points),
                "",
                f"{_when(evaluation, 'evaluation.every')}; {held_out:,} held-out prompts each",
            )
        )
    else:
        figures.append(Figure("evaluations", 0, "", "no data.held_out"))
    if every:
        how = f"{_when(every, 'checkpoint.every')}; the last {config.checkpoint.keep} are kept"
        figures.append(Figure("checkpoints", len(milestones(config.steps, every)), "", how))
    else:
        figures.append(Figure("checkpoints", 0, "", "checkpoint.every is 0: none"))
    return Chapter("The run", tuple(figures))


def milestones(steps: int, every: int) -> list[int]:
    """Start, each so many steps, and end. 7 steps, every 3: 0, 3, 6, 7."""
    between = range(every, steps, every) if every else ()
    return [0, *between, steps]


def _when(every: int, key: str) -> str:
    between = f", after each {every} steps ({key})" if every else ""
    return f"at the start{between} and at the end"


def _meaning(stale: int) -> str:
    if stale == 0:
        return "rollout.max_staleness 0: synchronous, rollout waits for each weight update"
    ahead = "a step" if stale == 1 else f"{stale} steps"
    return f"rollout.max_staleness: rollout runs up to {ahead} ahead of training"


def _times(count: float) -> str:
    return "at most once" if count <= 1 else f"{count:,.3g} times"
