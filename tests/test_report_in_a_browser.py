"""The report as a person has it: in a real browser, from a file and from the live server."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest
from made_run import RolloutRecord, append, make_run, step_record
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from areal_ray.observability.report import LiveReport, write_report

SECTIONS = [
    "reward",
    "time",
    "events",
    "staleness",
    "throughput",
    "updates",
    "learning",
    "loops",
    "samples",
    "config",
]
TAKES_OVER = "document.title='taken'"
EVIL = f'</script><script>{TAKES_OVER}</script><img src=x onerror="{TAKES_OVER}">'


class Request(msgspec.Struct):
    url: str


class Parameters(msgspec.Struct):
    request: Request | None = None


class Happened(msgspec.Struct):
    method: str
    params: Parameters


class Logged(msgspec.Struct):
    """A line of Chrome's performance log, as far as it is read here."""

    message: Happened


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_run(tmp_path_factory.mktemp("runs") / "made")
    append(
        directory / "rollouts.jsonl",
        [RolloutRecord(120, 999, EVIL, EVIL, EVIL, 9.0, "stop", [1], [1, 2], [118, 119])],
    )
    return directory


@pytest.fixture
def page(browser: webdriver.Chrome, run: Path) -> webdriver.Chrome:
    browser.get("about:blank")
    requests_of(browser)
    browser.get_log("browser")
    browser.get(write_report(run).as_uri())
    return browser


def requests_of(browser: webdriver.Chrome) -> list[str]:
    """Every address that was asked for since the last call."""
    lines = [
        msgspec.json.decode(entry["message"], type=Logged)
        for entry in browser.get_log("performance")
    ]
    return [
        line.message.params.request.url
        for line in lines
        if line.message.method == "Network.requestWillBeSent" and line.message.params.request
    ]


def seen(timeline: WebElement) -> float:
    """How many seconds of the run the timeline shows."""
    return float(timeline.get_attribute("data-to")) - float(timeline.get_attribute("data-from"))


def colour_of_the_page(browser: webdriver.Chrome) -> str:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def test_the_page_opens_from_a_file_and_asks_nobody_for_anything(page: webdriver.Chrome) -> None:
    assert page.title == "made · areal_ray"
    assert page.get_log("browser") == []
    # The page itself, its empty icon, and nothing else.
    assert {url.partition(":")[0] for url in requests_of(page)} <= {"file", "data"}


def test_every_section_is_there_and_shows_something(page: webdriver.Chrome) -> None:
    sections = page.find_elements(By.TAG_NAME, "section")
    assert [section.get_attribute("id") for section in sections] == SECTIONS
    assert [n for n in page.find_elements(By.CLASS_NAME, "notice") if n.is_displayed()] == []
    for name in ("reward", "staleness", "throughput", "updates", "learning"):
        for chart in page.find_elements(By.CSS_SELECTOR, f"#{name} .chart"):
            lines = chart.find_elements(By.CSS_SELECTOR, "path.line, path.area")
            drawn = [line for line in lines if len(line.get_attribute("d")) > 200]
            assert drawn or not chart.is_displayed()
    head = page.find_element(By.ID, "head").text
    for told in ("made", "step 120 of 160", "10 min", "2 warnings, 1 group failed"):
        assert told in head
    events = page.find_element(By.ID, "events").text
    assert "lost: ActorDiedError: killed by signal 9" in events
    assert "Qwen/Qwen2.5-0.5B" in page.find_element(By.ID, "config").text
    assert len(page.find_elements(By.CLASS_NAME, "share")) == 4


def test_what_a_model_wrote_is_shown_and_does_nothing(page: webdriver.Chrome) -> None:
    best = page.find_elements(By.CSS_SELECTOR, "#samples .quoted.sampled pre")
    assert EVIL in [one.text for one in best]
    assert page.title == "made · areal_ray"


def test_the_timeline_zooms_moves_and_tells(page: webdriver.Chrome) -> None:
    timeline = page.find_element(By.ID, "timeline")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", timeline)
    whole = seen(timeline)
    assert whole == pytest.approx(600, abs=1)
    ActionChains(page).move_to_element(timeline).perform()
    told = page.find_element(By.ID, "tip").text
    assert "trainer · 4:" in told
    assert "busy" in told
    wheel = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(timeline)
    ActionChains(page).scroll_from_origin(wheel, 0, -400).perform()
    zoomed = seen(timeline)
    assert zoomed == pytest.approx(whole * 1.0015**-400, rel=0.01)
    began = float(timeline.get_attribute("data-from"))
    ActionChains(page).drag_and_drop_by_offset(timeline, 100, 0).perform()
    assert float(timeline.get_attribute("data-from")) < began
    assert seen(timeline) == pytest.approx(zoomed, rel=0.001)
    ActionChains(page).send_keys_to_element(timeline, "0").perform()
    assert seen(timeline) == pytest.approx(whole)
    page.find_element(By.CSS_SELECTOR, "#events tbody tr:nth-child(4)").send_keys(Keys.ENTER)
    assert float(timeline.get_attribute("data-from")) == pytest.approx(287 - 20, abs=0.1)


def test_pointing_at_a_chart_tells_its_values(page: webdriver.Chrome) -> None:
    chart = page.find_element(By.CSS_SELECTOR, "#reward svg")
    ActionChains(page).move_to_element(chart).perform()
    told = page.find_element(By.ID, "tip").text
    assert "step 58" in told
    assert "held out, greedy at step 45" in told


def test_a_dark_browser_gets_a_dark_page(page: webdriver.Chrome) -> None:
    light = colour_of_the_page(page)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    assert (light, colour_of_the_page(page)) == ("rgb(246, 246, 243)", "rgb(18, 21, 23)")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("left", [("config.yaml",), ("metrics.jsonl",), ("timeline.jsonl",)])
def test_a_run_of_which_little_is_there_is_shown_without_an_error(
    browser: webdriver.Chrome, run: Path, tmp_path: Path, left: tuple[str, ...]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    for name in left:
        shutil.copy(run / name, tmp_path)
    browser.get_log("browser")
    browser.get(write_report(tmp_path).as_uri())
    assert browser.get_log("browser") == []
    sections = browser.find_elements(By.TAG_NAME, "section")
    assert [section.get_attribute("id") for section in sections] == SECTIONS


def test_the_live_page_takes_up_new_steps_by_itself(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    directory = make_run(tmp_path / "going-on", steps=30)
    report = LiveReport(directory)
    try:
        address = report.start()
        requests_of(browser)
        browser.get(address)
        wait = WebDriverWait(browser, 30)
        wait.until(lambda page: "step 30 of 160" in page.find_element(By.ID, "head").text)
        timeline = browser.find_element(By.ID, "timeline")
        ActionChains(browser).send_keys_to_element(timeline, "+").perform()
        zoomed = seen(timeline)
        browser.get_log("browser")
        append(directory / "metrics.jsonl", [step_record(31, random.Random(1))])
        wait.until(lambda page: "step 31 of 160" in page.find_element(By.ID, "head").text)
        assert seen(timeline) == pytest.approx(zoomed)
        assert browser.get_log("browser") == []
        assert all(url.startswith((address, "data:")) for url in requests_of(browser))
    finally:
        report.close()
    # The run is over, and the page says that nobody answers.
    wait.until(lambda page: "not reachable" in page.find_element(By.ID, "head").text)
