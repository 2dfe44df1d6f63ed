from __future__ import annotations

import itertools
import json
import re
import time
import urllib.request
from pathlib import Path

import pytest

from areal_ray.cli import main
from areal_ray.cli.dashboard import CONFIGURATION, folder_of
from areal_ray.observability import metrics
from areal_ray.observability.grafana import FILE_NAME, UID, dashboard, exported_names
from areal_ray.observability.metrics import METRICS

WHOLE = json.loads(dashboard())
PANELS = [panel for panel in WHOLE["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAME = re.compile(r"ray_areal_ray_\w+")


def test_every_metric_is_drawn_by_the_name_on_rays_endpoint() -> None:
    drawn = {name for expression in EXPRESSIONS for name in NAME.findall(expression)}
    assert drawn <= {name for metric in METRICS for name in exported_names(metric)}
    for metric in METRICS:
        assert drawn & set(exported_names(metric)), metric.name


def test_counters_are_drawn_as_rates_and_histograms_as_distributions() -> None:
    for expression in EXPRESSIONS:
        name = NAME.search(expression).group()
        assert name.endswith(("_total", "_bucket")) == ("[$__rate_interval]" in expression)
    over_staleness = [one for one in EXPRESSIONS if "staleness_versions_bucket" in one]
    assert sum(one.startswith("histogram_quantile(") for one in over_staleness) == 2
    (heatmap,) = (panel for panel in PANELS if panel["type"] == "heatmap")
    assert heatmap["targets"][0]["format"] == "heatmap"


def test_every_series_is_of_the_chosen_runs_and_told_apart_by_tags_that_it_has() -> None:
    tags = {name: metric.tags for metric in METRICS for name in exported_names(metric)}
    for panel in PANELS:
        for target in panel["targets"]:
            assert 'run=~"$run"' in target["expr"]
            assert target["expr"].count("(") == target["expr"].count(")")
            known = {*tags[NAME.search(target["expr"]).group()], "le"}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known
            grouped = re.findall(r"by \(([\w, ]+)\)", target["expr"])
            assert {tag for one in grouped for tag in one.split(", ")} <= known


def test_panels_have_units_a_data_source_and_no_two_share_a_place() -> None:
    assert len({panel["id"] for panel in WHOLE["panels"]}) == len(WHOLE["panels"])
    cells = []
    for panel in WHOLE["panels"]:
        place = panel["gridPos"]
        across = range(place["x"], place["x"] + place["w"])
        cells += itertools.product(across, range(place["y"], place["y"] + place["h"]))
        assert max(across) < 24
    assert len(cells) == len(set(cells))
    for panel in PANELS:
        assert panel["datasource"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_the_variables_are_the_data_source_the_session_and_the_run() -> None:
    source, session, run = WHOLE["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert (session["name"], run["name"]) == ("SessionName", "run")
    assert run["query"] == 'label_values(ray_areal_ray_step{SessionName=~"$SessionName"}, run)'
    assert WHOLE["uid"] == UID


def test_without_a_cluster_it_is_written_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    assert main(["dashboard", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == WHOLE
    assert "Import it in Grafana" in capsys.readouterr().out
    assert main(["dashboard", "--out", str(tmp_path / "nowhere" / "mine.json")]) == 2


def test_grafanas_folder_is_where_rays_provisioning_says(tmp_path: Path) -> None:
    assert folder_of(tmp_path) is None
    providers = tmp_path / "metrics" / "grafana" / "provisioning" / "dashboards" / "default.yml"
    providers.parent.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    providers.write_text(f"providers:\n  - name: Ray\n    options:\n      path: {elsewhere}\n")
    assert folder_of(tmp_path) is None  # of another machine
    elsewhere.mkdir()
    assert folder_of(tmp_path) == elsewhere


def test_a_running_ray_exports_these_names_and_its_grafana_finds_the_file(
    ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray
    from ray.util import metrics as ray_metrics

    chosen = (metrics.REWARD, metrics.GENERATED_TOKENS, metrics.STALENESS)

    @ray.remote(num_cpus=0)
    class Exporter:
        def __init__(self) -> None:
            gauge, counter, histogram = chosen
            self._set = ray_metrics.Gauge(gauge.full_name, tag_keys=gauge.tags)
            self._count = ray_metrics.Counter(counter.full_name, tag_keys=counter.tags)
            self._observe = ray_metrics.Histogram(
                histogram.full_name, boundaries=list(histogram.bounds), tag_keys=histogram.tags
            )

        def export(self) -> None:
            self._set.set(0.5, {"run": "scraped"})
            self._count.inc(3, {"run": "scraped", "engine": "engine-0"})
            self._observe.observe(1, {"run": "scraped"})

    exporter = Exporter.remote()
    ray.get(exporter.export.remote())
    address = ray.get_runtime_context().gcs_address
    # Meanwhile the metrics are on their way.
    assert main(["dashboard", "--address", address]) == 0
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    written = session / "metrics" / "grafana" / "dashboards" / FILE_NAME
    assert json.loads(written.read_text()) == WHOLE
    said = capsys.readouterr().out
    assert str(written) in said
    assert str(session / CONFIGURATION) in said
    assert (session / CONFIGURATION).is_file()

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = {name for metric in chosen for name in exported_names(metric)}
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 40
    seen: set[str] = set()
    while not wanted <= seen:
        assert time.monotonic() < deadline, wanted - seen
        time.sleep(0.5)  # between two looks
        with without_proxy.open(url, timeout=5) as scraped:
            lines = scraped.read().decode().splitlines()
        seen = {NAME.match(line).group() for line in lines if 'run="scraped"' in line}
