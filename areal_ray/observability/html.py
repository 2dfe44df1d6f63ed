"""How objects show themselves in a notebook: plain HTML with inline styles.

Notebooks are light or dark, and tell nobody which: so text has the theme's own colour, and all
other colours are translucent. What comes from a model or a user is text, and stays text: whatever
is not `Markup` is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from areal_ray.observability.records import EvaluationRecord, Record, StepRecord
from areal_ray.types import FinishReason, Prompt, TrajectoryGroup

if TYPE_CHECKING:
    from areal_ray.try_outs import Answers
    from areal_ray.weights.transaction import Outcome
    from areal_ray.workbench import BenchStatus

MAX_SAMPLES = 32
MAX_TOKENS = 400
"""Of a sample. Each is an element of its own, and browsers have to draw them."""

LINE = "1px solid rgba(128,128,128,0.3)"
GOOD, FAIR, BAD, CALM = "22,163,74", "217,119,6", "220,38,38", "37,99,235"
STATES = {"serving": GOOD, "suspect": FAIR, "dead": BAD}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def bench_html(bench: BenchStatus) -> str:
    rollout, queue = bench.rollout, bench.queue
    engines = [
        (
            engine.name,
            _badge(engine.state, STATES.get(engine.state, CALM)),
            bench.served if engine.state == "serving" else "–",
            f"{rollout.engine_loads.get(engine.name, 0):,} tokens",
            f"incarnation {engine.incarnation}: {engine.cause}" if engine.cause else "",
        )
        for engine in rollout.engines
    ]
    ledger = rollout.ledger
    counts = (
        ("on their way", ledger.running),
        ("accepted", ledger.accepted),
        ("filtered", ledger.filtered),
        ("failed", ledger.failed),
        ("expired", ledger.expired),
    )
    ahead = bench.version - bench.served
    facts = (
        ("rollout", _badge("paused", CALM) if rollout.paused else _badge("going on", GOOD)),
        (
            "trainer",
            f"{_count(bench.steps, 'step')}, version {bench.version}"
            + (f": {ahead} ahead of the engines" if ahead else ""),
        ),
        ("queue", f"{queue.waiting_groups} groups wait, {_bytes(queue.held_bytes)}"),
        ("ledger", " · ".join(f"{count:,} {what}" for what, count in counts)),
        ("generated", f"{rollout.generated_tokens:,} tokens"),
        ("files", bench.directory),
    )
    return _card(
        f"Workbench {bench.name}",
        _table(("engine", "state", "version", "outstanding", ""), engines),
        _facts(facts),
        _failures(bench),
    )


def answers_html(answers: Answers) -> str:
    versions = _versions([completion.versions for completion in answers.completions])
    rows = [
        (
            _tokens(
                pieces,
                completion.logprobs,
                completion.versions,
                np.ones(len(pieces), dtype=np.bool_),
                show_versions=len(versions) > 1,
            ),
            len(completion.token_ids),
            _finish(completion.finish_reason),
            f"{float(completion.logprobs.sum()):.2f}",
        )
        for completion, pieces in zip(answers.completions, answers.pieces, strict=True)
    ]
    said = f"{_count(len(rows), 'sample')} by {answers.engine} in {_duration(answers.seconds)}"
    return _card(
        _prompt(answers.prompt),
        _table(("answer", "tokens", "ended by", "log p"), rows[:MAX_SAMPLES]),
        _left_out(len(rows)),
        _legend(said, versions),
    )


def group_html(group: TrajectoryGroup) -> str:
    """Of one that was tried out, the tokens are shown by their text; of any other, by number."""
    trajectories = group.trajectories[:MAX_SAMPLES]
    pieces = getattr(group, "pieces", None) or [t.response_ids.tolist() for t in trajectories]
    versions = _versions([t.versions[t.response_mask] for t in group.trajectories])
    rewards = [t.reward for t in group.trajectories]
    rows = [
        (
            _reward(trajectory.reward, min(rewards), max(rewards)),
            _tokens(
                [str(piece) for piece in texts],
                trajectory.logprobs,
                trajectory.versions,
                trajectory.response_mask,
                show_versions=len(versions) > 1,
            ),
            len(trajectory.response_ids),
            _finish(trajectory.finish_reason),
        )
        for trajectory, texts in zip(trajectories, pieces, strict=False)
    ]
    said = f"{_count(len(rewards), 'sample')}, mean reward {np.mean(rewards):.3f}"
    if (engine := getattr(group, "engine", "")) and (seconds := getattr(group, "seconds", 0.0)):
        said += f", by {engine} in {_duration(seconds)}"
    return _card(
        _prompt(group.prompt),
        _table(("reward", "response", "tokens", "ended by"), rows),
        _left_out(len(rewards)),
        _legend(said, versions),
    )


def outcome_html(outcome: Outcome) -> str:
    facts = [
        ("engines", f"{outcome.engines} serve it"),
        ("staged in", _duration(outcome.staged_s)),
        ("stood still for", f"{_duration(outcome.longest_pause_s)}, the slowest of them"),
    ]
    if outcome.attempts > 1:
        facts.append(("attempts", str(outcome.attempts)))
    facts += [(f"lost {one.name}", one.cause) for one in outcome.lost]
    return _card(f"Weight update: version {outcome.version}", _facts(facts))


def records_html(records: Sequence[Record]) -> str:
    if all(isinstance(record, EvaluationRecord) for record in records):
        rows = [(r.step, r.version, f"{r.reward:.3f}", r.prompts) for r in records]
        return _card("", _table(("step", "version", "held-out reward", "prompts"), rows))
    rows = [_step_row(r) if isinstance(r, StepRecord) else _evaluation_row(r) for r in records]
    heads = ("step", "version", "reward", "loss", "staleness", "tokens/s", "waited", "trained")
    return _card("", _table((*heads, "staged", "paused"), rows))


def line_html(text: str) -> str:
    """What is being done, in a line that is drawn anew."""
    return f'<span style="opacity:0.7">{html.escape(text)}</span>'


def _step_row(record: StepRecord) -> tuple[object, ...]:
    return (
        record.step,
        record.version,
        f"{record.reward:.3f}",
        f"{record.loss:.4f}",
        f"{record.staleness_mean:.1f} (max {record.staleness_max})",
        f"{record.tokens_per_s:,.0f}",
        _duration(record.waited_s),
        _duration(record.train_s),
        "–" if record.staged_s is None else _duration(record.staged_s),
        "–" if record.pause_s is None else _duration(record.pause_s),
    )


def _evaluation_row(record: EvaluationRecord) -> tuple[object, ...]:
    held_out = _badge(f"{record.reward:.3f} held out", CALM)
    return (record.step, record.version, held_out, *[""] * 7)


def _failures(bench: BenchStatus) -> Markup:
    rows = [
        (kind.error, kind.count, kind.message.strip().rpartition("\n")[2][:160])
        for kind in bench.rollout.failures
    ]
    return _table(("failures", "", "the last line of the first"), rows) if rows else Markup("")


def _tokens(
    pieces: Sequence[str],
    logprobs: NDArray[np.float32],
    versions: NDArray[np.int32],
    mask: NDArray[np.bool_],
    *,
    show_versions: bool,
) -> Markup:
    shown = [
        _token(piece, float(logprob), int(version), show_versions)
        if is_generated
        else _context(piece)
        for piece, logprob, version, is_generated in zip(
            pieces[:MAX_TOKENS], logprobs, versions, mask, strict=False
        )
    ]
    if len(pieces) > MAX_TOKENS:
        shown.append(_muted(f" … {len(pieces) - MAX_TOKENS:,} more tokens"))
    inner = "".join(shown)
    style = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace"
    return Markup(f'<span style="{style}">{inner}</span>')


def _token(piece: str, logprob: float, version: int, show_version: bool) -> Markup:
    probability = math.exp(min(logprob, 0.0))
    style = f"background:rgba(234,88,12,{0.6 * (1 - probability):.2f});border-radius:3px"
    if show_version:
        style += f";border-bottom:2px solid {_hue(version)}"
    told = f"p {probability:.3f}, logprob {logprob:.3f}, version {version}"
    return Markup(f'<span title="{told}" style="{style}">{_visible(piece)}</span>')


def _context(piece: str) -> Markup:
    """A token that no model made."""
    return Markup(f'<span title="context" style="opacity:0.5">{_visible(piece)}</span>')


def _visible(piece: str) -> str:
    return html.escape(piece).replace("\n", "↵\n") or "·"


def _hue(version: int) -> str:
    """Neighbouring versions are far apart on the wheel."""
    return f"hsl({version * 137.5 % 360:.0f},65%,50%)"


def _legend(said: str, versions: Sequence[int]) -> Markup:
    parts = [_muted(f"{said} ·")]
    likely = "rgba(234,88,12,0)", "rgba(234,88,12,0.6)"
    scale = f"background:linear-gradient(90deg,{','.join(likely)});border:{LINE};border-radius:3px"
    parts.append(_muted("sure"))
    parts.append(f'<span style="display:inline-block;width:4em;height:0.8em;{scale}"></span>')
    parts.append(_muted("unlikely ·"))
    if len(versions) == 1:
        parts.append(_muted(f"version {versions[0]}"))
    else:
        parts += [
            f'<span style="border-bottom:2px solid {_hue(version)}">version {version}</span>'
            for version in versions
        ]
    return Markup(f'<div style="margin-top:4px;font-size:0.9em">{" ".join(parts)}</div>')


def _versions(arrays: Iterable[NDArray[np.int32]]) -> list[int]:
    return sorted({int(version) for array in arrays for version in np.unique(array)})


def _reward(reward: float, low: float, high: float) -> Markup:
    """Green for the best of the group, red for the worst; none where all are alike."""
    if high == low:
        return _badge(f"{reward:g}", "128,128,128")
    part = (reward - low) / (high - low)
    return _badge(f"{reward:.3g}", GOOD if part > 2 / 3 else FAIR if part > 1 / 3 else BAD)


def _finish(reason: FinishReason | None) -> Markup | str:
    return _badge("length", FAIR) if reason == "length" else reason or ""


def _prompt(prompt: Prompt) -> str:
    """As one line."""
    said = prompt.text
    if said is None:
        said = " ".join(f"{message.role}: {message.content}" for message in prompt.messages or ())
    expected = "" if prompt.answer is None else f" (expected: {prompt.answer})"
    return (said if len(said) <= 300 else f"{said[:300]} …") + expected


def _left_out(samples: int) -> Markup:
    more = samples - MAX_SAMPLES
    return _muted(f"… {more} more samples") if more > 0 else Markup("")


def _card(title: str, *parts: str) -> str:
    head = f'<div style="font-weight:600;margin-bottom:4px">{_escaped(title)}</div>'
    inner = (head if title else "") + "".join(parts)
    return f'<div style="overflow-x:auto;padding:2px 0">{inner}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    cell = f"text-align:left;vertical-align:top;padding:2px 14px 2px 0;border-bottom:{LINE}"
    cell += ";background:transparent"
    above = "".join(
        f'<th style="{cell};font-weight:normal;opacity:0.7">{_escaped(head)}</th>' for head in heads
    )
    body = "".join(
        f'<tr>{"".join(f"""<td style="{cell}">{_escaped(value)}</td>""" for value in row)}</tr>'
        for row in rows
    )
    style = "border-collapse:collapse;margin:0;font-variant-numeric:tabular-nums"
    return Markup(f'<table style="{style}"><tr>{above}</tr>{body}</table>')


def _facts(facts: Iterable[tuple[str, object]]) -> Markup:
    rows = "".join(
        f'<tr><th style="text-align:left;font-weight:normal;opacity:0.7;padding:2px 14px 2px 0;'
        f'background:transparent">{_escaped(name)}</th>'
        f'<td style="text-align:left;padding:2px 0;background:transparent">{_escaped(value)}</td>'
        "</tr>"
        for name, value in facts
    )
    return Markup(f'<table style="border-collapse:collapse;margin:6px 0 0 0">{rows}</table>')


def _badge(text: str, rgb: str) -> Markup:
    style = f"background:rgba({rgb},0.2);border:1px solid rgba({rgb},0.5);border-radius:8px"
    return Markup(f'<span style="{style};padding:0 6px">{_escaped(text)}</span>')


def _muted(text: str) -> Markup:
    return Markup(f'<span style="opacity:0.7">{_escaped(text)}</span>')


def _escaped(value: object) -> str:
    return value if isinstance(value, Markup) else html.escape(str(value))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
