"""A Grafana dashboard of every metric, in the form that Grafana reads.

Ray's exporter puts `ray_` in front of a metric's name, and behind a counter's `_total`, behind a
histogram's `_bucket`, `_sum` and `_count`. Each process that sets one gets a series of its own (tag
`WorkerId`), so a gauge is taken as the highest over them, and rates are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from areal_ray.observability import metrics
from areal_ray.observability.metrics import Metric

UID = "arealRayDashboard"
FILE_NAME = "areal_ray_grafana_dashboard.json"
ROW_WIDTH, PANEL_HEIGHT = 24, 8
OUTSIDE = 'SessionName=~"$SessionName",run=~"$run"'
"""Of every series, those that the variables choose."""

PanelKind = Literal["timeseries", "heatmap", "row"]


class _Grafana(msgspec.Struct, frozen=True, rename="camel"):
    """As Grafana spells it."""


class Target(_Grafana, omit_defaults=True):
    expr: str
    legend_format: str
    ref_id: str
    format: Literal["time_series", "heatmap"] = "time_series"


class GridPos(_Grafana):
    x: int
    y: int
    w: int
    h: int


class Panel(_Grafana, omit_defaults=True):
    id: int
    title: str
    type: PanelKind
    grid_pos: GridPos
    description: str = ""
    datasource: str = ""
    targets: list[Target] = []
    field_config: dict[str, object] = {}
    options: dict[str, object] = {}


class Variable(_Grafana, omit_defaults=True):
    name: str
    type: Literal["datasource", "query"]
    query: str
    label: str = ""
    datasource: str = ""
    definition: str = ""
    refresh: int = 0
    multi: bool = False
    include_all: bool = False
    all_value: str = ""
    hide: int = 0
    sort: int = 0


class TimeRange(msgspec.Struct, frozen=True, rename={"start": "from", "end": "to"}):
    start: str
    end: str


class Templating(_Grafana):
    list: list[Variable]


class Dashboard(_Grafana):
    uid: str
    title: str
    tags: list[str]
    panels: list[Panel]
    templating: Templating
    time: TimeRange
    refresh: str = "10s"
    schema_version: int = 39
    editable: bool = True
    graph_tooltip: int = 1
    """The same moment is marked in all panels."""


class Chart(msgspec.Struct, frozen=True):
    """One panel, before it has a place."""

    title: str
    metrics: tuple[Metric, ...]
    width: int = 8
    stacked: bool = False
    unit: str | None = None
    """None: the first metric's."""
    states: str = ""
    """Only series whose `state` matches."""
    by: tuple[str, ...] | None = None
    """The tags to tell series apart by. None: all that the metric has."""
    kind: PanelKind = "timeseries"
    counted: bool = False
    """Draw how many came, not how many a second: for what is rare."""


ROWS: dict[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart("Reward", (metrics.REWARD, metrics.HELD_OUT_REWARD), width=12),
        Chart("Steps and versions", (metrics.STEP, metrics.VERSION), width=12),
        Chart("Loss", (metrics.LOSS,), width=6),
        Chart("Norm of the gradient", (metrics.GRAD_NORM,), width=6),
        Chart("KL to who sampled", (metrics.KL_TO_BEHAVIOUR,), width=6),
        Chart("Tokens of an answer", (metrics.RESPONSE_TOKENS,), width=6),
    ),
    "Rollout": (
        Chart("Staleness of what is trained on", (metrics.STALENESS,), width=12, kind="heatmap"),
        Chart("Staleness, median and 99 %", (metrics.STALENESS, metrics.STALENESS_MEAN), width=12),
        Chart("Groups", (metrics.GROUPS,), states="running|accepted"),
        Chart("Finished groups that wait", (metrics.QUEUE_GROUPS,)),
        Chart("Their size", (metrics.QUEUE_BYTES,)),
    ),
    "Engines": (
        Chart("Tokens per second", (metrics.GENERATED_TOKENS,), width=12, stacked=True),
        Chart("Requests in flight", (metrics.REQUESTS,), width=12, stacked=True),
        Chart(
            "Engines by state", (metrics.ENGINE_STATE,), width=12, stacked=True, by=("run", "state")
        ),
        Chart("Versions behind", (metrics.VERSION_LAG,), width=12),
    ),
    "Weight updates": (Chart("Phases of an update", (metrics.UPDATE_PHASE_SECONDS,), width=24),),
    "Where the time goes": (
        Chart(
            "Engines and trainer by what they do",
            (metrics.ACTIVITY_SECONDS,),
            width=12,
            stacked=True,
            unit="short",
            by=("activity",),
        ),
        Chart(
            "GPUs without work, by cause",
            (metrics.GPU_IDLE_SECONDS,),
            width=12,
            stacked=True,
            unit="short",
            by=("cause",),
        ),
        Chart(
            "Who does what",
            (metrics.ACTIVITY_SECONDS,),
            width=12,
            unit="percentunit",
            by=("run", "actor", "activity"),
        ),
        Chart(
            "The trainer's step", (metrics.TRAIN_SECONDS, metrics.TRAINER_WAITED_SECONDS), width=12
        ),
    ),
    "Event loops": (Chart("Lag, 99th percentile", (metrics.LOOP_LAG_P99_MS,), width=24),),
    "Failures": (
        Chart(
            "Losses, recoveries and failures",
            (metrics.EVENTS,),
            width=12,
            stacked=True,
            unit="short",
            counted=True,
        ),
        Chart("Groups lost", (metrics.GROUPS,), width=12, states="failed|expired|filtered"),
    ),
}


def dashboard() -> bytes:
    """The JSON file."""
    panels: list[Panel] = []
    top = 0
    for title, charts in ROWS.items():
        panels.append(Panel(len(panels) + 1, title, "row", GridPos(0, top, ROW_WIDTH, 1)))
        top, left = top + 1, 0
        for chart in charts:
            if left + chart.width > ROW_WIDTH:
                top, left = top + PANEL_HEIGHT, 0
            place = GridPos(left, top, chart.width, PANEL_HEIGHT)
            panels.append(_panel(len(panels) + 1, chart, place))
            left += chart.width
        top += PANEL_HEIGHT
    whole = Dashboard(
        uid=UID,
        title="areal_ray",
        tags=["ray", "areal_ray"],
        panels=panels,
        templating=Templating(_variables()),
        time=TimeRange("now-30m", "now"),
    )
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)


def exported_names(metric: Metric) -> tuple[str, ...]:
    """What a scrape of Ray's endpoint calls its series."""
    name = f"ray_{metric.full_name}"
    match metric.kind:
        case "gauge":
            return (name,)
        case "counter":
            return (f"{name}_total",)
        case "histogram":
            return (f"{name}_bucket", f"{name}_sum", f"{name}_count")


def _variables() -> list[Variable]:
    """The data source as in Ray's own dashboards; the cluster's session; the run."""
    step = exported_names(metrics.STEP)[0]
    sessions = f"label_values({step}, SessionName)"
    runs = f'label_values({step}{{SessionName=~"$SessionName"}}, run)'
    return [
        Variable("datasource", "datasource", "prometheus", refresh=1, hide=2),
        _choice("SessionName", "Ray session", sessions),
        _choice("run", "Run", runs),
    ]


def _choice(name: str, label: str, query: str) -> Variable:
    return Variable(
        name,
        "query",
        query,
        label=label,
        datasource="${datasource}",
        definition=query,
        refresh=2,
        multi=True,
        include_all=True,
        all_value=".+",
        sort=2,
    )


def _panel(number: int, chart: Chart, place: GridPos) -> Panel:
    unit = chart.unit or _shown_unit(chart.metrics[0])
    drawn: dict[str, object] = {"fillOpacity": 10, "showPoints": "never", "spanNulls": True}
    if chart.stacked:
        drawn |= {"fillOpacity": 60, "lineWidth": 0, "stacking": {"mode": "normal"}}
    options: dict[str, object] = {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if chart.kind == "heatmap":
        options = {
            "calculate": False,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "yAxis": {"unit": "short"},
            "cellGap": 1,
        }
    return Panel(
        number,
        chart.title,
        chart.kind,
        place,
        description="\n\n".join(metric.description for metric in chart.metrics),
        datasource="${datasource}",
        targets=_targets(chart),
        field_config={"defaults": {"unit": unit, "custom": drawn}, "overrides": []},
        options=options,
    )


def _shown_unit(metric: Metric) -> str:
    """A counter is drawn as its rate: seconds per second are a number, not a time."""
    if metric.kind == "counter":
        return "short" if metric.unit == "s" else "cps"
    return metric.unit


def _targets(chart: Chart) -> list[Target]:
    drawn: list[tuple[str, str]] = []
    for metric in chart.metrics:
        prefix = f"{metric.name.replace('_', ' ')} " if len(chart.metrics) > 1 else ""
        drawn += _series(metric, chart, prefix)
    form = "heatmap" if chart.kind == "heatmap" else "time_series"
    return [
        Target(expr, legend, chr(ord("A") + number), form)
        for number, (expr, legend) in enumerate(drawn)
    ]


def _series(metric: Metric, chart: Chart, prefix: str) -> list[tuple[str, str]]:
    """Expressions, with their legends."""
    by = metric.tags if chart.by is None else chart.by
    chosen = OUTSIDE + (f',state=~"{chart.states}"' if chart.states else "")
    series = f"{exported_names(metric)[0]}{{{chosen}}}"
    legend = prefix + " ".join(f"{{{{{tag}}}}}" for tag in by)
    match metric.kind:
        case "counter":
            growth = "increase" if chart.counted else "rate"
            return [(_over("sum", by, f"{growth}({series}[$__rate_interval])"), legend)]
        case "histogram" if chart.kind == "heatmap":
            rate = f"increase({series}[$__rate_interval])"
            return [(_over("sum", ("le",), rate), "{{le}}")]
        case "histogram":
            rate = _over("sum", ("le", *by), f"rate({series}[$__rate_interval])")
            return [
                (f"histogram_quantile({part}, {rate})", f"{percent} {legend}")
                for part, percent in ((0.5, "median"), (0.99, "99 %"))
            ]
    if chart.by is not None:  # as many as are in each state, say
        inner = _over("max", metric.tags, series)
        return [(_over("sum", by, inner), legend)]
    return [(_over("max", by, series), legend)]


def _over(how: str, by: Sequence[str], series: str) -> str:
    return f"{how} by ({', '.join(by)}) ({series})"
