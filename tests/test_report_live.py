from __future__ import annotations

import http.client
import json
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_run import (
    append,
    make_run,
    step_record,
)

from areal_ray.observability.report import LiveReport
from areal_ray.observability.report.data import RunReader


def embedded(html: str) -> dict[str, object]:
    (found,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)
    return json.loads(found)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "made", steps=20)


@pytest.fixture(scope="module")
def live(run: Path) -> Iterator[str]:
    report = LiveReport(run)
    yield report.start()
    report.close()


def get(address: str, **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=named)) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.05)


def live_step(address: str) -> int:
    return json.loads(get(f"{address}data.json")[1])["summary"]["step"]


def test_the_live_report_takes_up_what_is_written(run: Path, live: str) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", live)
    until(lambda: live_step(live) == 20)
    append(run / "metrics.jsonl", [step_record(21, random.Random(1))])
    until(lambda: live_step(live) == 21)
    status, page, headers = get(live)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert embedded(page.decode())["summary"]["step"] == 21
    assert b"connect-src 'self'" in page


def test_the_live_report_sends_nothing_twice(live: str) -> None:
    def is_told_so() -> bool:
        tag = get(f"{live}data.json")[2]["ETag"]
        return get(f"{live}data.json", If_None_Match=tag)[0] == 304

    until(is_told_so)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200),
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("[::1]:9", 200),
        ("rebound.example", 403),
        ("127.0.0.1.rebound.example:80", 403),
        ("127.0.0.1@rebound.example", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_only_a_request_that_means_this_machine_is_answered(
    live: str, host: str, status: int
) -> None:
    assert get(f"{live}data.json", Host=host)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_only_get_is_answered(live: str, method: str) -> None:
    connection = http.client.HTTPConnection(live.removeprefix("http://").rstrip("/"))
    connection.request(method, "/data.json")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")
    connection.close()


def test_no_file_is_served(live: str) -> None:
    for path in ("config.yaml", "../made/config.yaml", "%2e%2e/made/config.yaml"):
        assert get(f"{live}{path}")[0] == 404


def test_a_live_report_of_an_empty_directory_waits_for_its_run(tmp_path: Path) -> None:
    report = LiveReport(tmp_path / "later")
    address = report.start()
    try:
        assert live_step(address) == 0
        make_run(tmp_path / "later", steps=3)
        until(lambda: live_step(address) == 3)
    finally:
        report.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address)
    report.close()


def test_what_cannot_be_read_is_told_and_goes_on(
    live: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(RunReader, "data", fails)
        status, body, _ = get(live)
        assert (status, body) == (500, b"OSError: the disk is gone")
    assert get(live)[0] == 200
