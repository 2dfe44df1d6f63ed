"""`areal-ray dashboard`: a Grafana dashboard of a run's metrics, where Ray's Grafana finds it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from areal_ray.cli.command import command
from areal_ray.errors import ArealRayError, ConfigError

CONFIGURATION = Path("metrics", "grafana", "grafana.ini")
PROVIDERS = Path("metrics", "grafana", "provisioning", "dashboards", "default.yml")
"""Both in a Ray session's directory; the second names the folder that Grafana reads."""


def add(commands: argparse._SubParsersAction) -> None:
    dashboard = command(
        commands,
        "dashboard",
        _run,
        summary="write a Grafana dashboard of the metrics on Ray's endpoint",
        description=(
            "Write a Grafana dashboard of everything that runs export on Ray's Prometheus "
            "endpoint: learning, rollout, engines, weight updates, where the time goes, event "
            "loops, failures.\n\n"
            "If a cluster is running (RAY_ADDRESS, or one on this machine), the file goes to the "
            "folder from which a Grafana that uses Ray's provisioning reads its dashboards; call "
            "this on the head node. Otherwise, or with --out, it is written to a file to import."
        ),
        examples=["areal-ray dashboard", "areal-ray dashboard --out areal_ray.json"],
        exit_codes={0: "written", 2: "refused: a bad command line, or no place to write to"},
    )
    dashboard.add_argument("--out", metavar="FILE", type=Path, help="write it there")
    dashboard.add_argument(
        "--address", metavar="ADDR", default="auto", help="of the cluster (default: RAY_ADDRESS)"
    )


def _run(options: argparse.Namespace) -> int:
    from areal_ray.observability.grafana import FILE_NAME, dashboard

    session = None if options.out is not None else _session(options.address)
    folder = None if session is None else folder_of(session)
    path = options.out or (folder or Path()) / FILE_NAME
    try:
        path.write_bytes(dashboard())
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from error
    print(f"areal-ray: {path}")
    print(IMPORT if folder is None else _found_by_grafana(session))
    return 0


IMPORT = """\
  Import it in Grafana: Dashboards > New > Import, with a Prometheus data source that scrapes Ray
  (its targets are in <Ray session>/prom_metrics_service_discovery.json)."""


def _found_by_grafana(session: Path) -> str:
    return (
        "  Grafana reads this folder by itself every ten seconds, if it runs with Ray's own\n"
        "  configuration:\n\n"
        f"    grafana-server --homepath <its home> --config {session / CONFIGURATION} web\n\n"
        "  The dashboard is then under Dashboards > Ray > areal_ray. Each Ray session has a\n"
        "  folder of its own: write it again for the next."
    )


def _session(address: str) -> Path | None:
    """The directory of the cluster's session. None if no cluster answers."""
    from areal_ray.placement.cluster_facts import ask

    try:
        return Path(ask(address).session_dir)
    except ArealRayError as error:
        print(f"areal-ray: no cluster to write it for: {error}", file=sys.stderr)
        return None


def folder_of(session: Path) -> Path | None:
    """Where Grafana looks, by Ray's provisioning file. None if that is on another machine."""
    try:
        providers = yaml.safe_load((session / PROVIDERS).read_text(encoding="utf-8"))
        folder = Path(providers["providers"][0]["options"]["path"])
    except (OSError, KeyError, IndexError, TypeError, yaml.YAMLError):
        return None
    return folder if folder.is_dir() else None
