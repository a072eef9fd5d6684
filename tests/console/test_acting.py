"""What people do from the pages to a real fleet, by keyboard alone: sign in, drain, undrain, scale. Without the admin token
nothing."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.browsing import Visit, press_until_focused
from tests.support.running_console import RunningConsole, running_console
from tests.support.up import POINTSMAN, RunningUp, pointsman_up

pytestmark = pytest.mark.browser

ENGINE = "scaled-2"
TOKEN = "the-admin-token-of-this-test"
FLEET_MILLISECONDS_MAX = 20_000
RECORDED = ("InstanceDraining", "InstanceUndrained", "ScaleDecided")


@pytest.fixture(scope="module")
def up(chromium: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with pointsman_up(
        tmp_path_factory.mktemp("fleet"), "--instances", "2..3", "--speed", "10", "--no-console"
    ) as running:
        running.wait_for("Ctrl-C")
        yield running
        running.stop()


@pytest.fixture(scope="module")
def console(up: RunningUp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    directory = tmp_path_factory.mktemp("console")
    token = directory / "token"
    token.write_text(TOKEN)
    with running_console(directory, "--from", str(up.data), "--admin-token-file", str(token), health="live") as running:
        yield running


def acts_in(up: RunningUp) -> list[dict[str, Any]]:
    """What people asked for, as the log has it."""
    tap = [POINTSMAN, "tap", "--from", str(up.data), "--since", "1", "--until", "now", "--json"]
    lines = subprocess.run(tap, check=True, capture_output=True, timeout=30).stdout.splitlines()
    events = [json.loads(line)["event"] for line in lines]
    return [event for event in events if event["type"] in RECORDED and event.get("by") and not event.get("leaving")]


def go_to(page: Page, role: Any, name: str) -> None:
    press_until_focused(page, page.get_by_role(role, name=name, exact=True).first)


def sign_in(page: Page) -> None:
    go_to(page, "link", "Sign in to act")
    page.keyboard.press("Enter")
    page.wait_for_url("**/sign-in")
    go_to(page, "textbox", "Admin token")
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "sign-in" not in url)


def test_without_the_token_a_reader_only_reads(up: RunningUp, console: RunningConsole, visit: Visit) -> None:
    visitor = visit(console.url)
    page = visitor.open("/")
    assert page.get_by_role("button", name="Drain").count() == 0
    before = acts_in(up)

    csrf = page.locator("input[name=csrf]").first
    token = csrf.get_attribute("value") if csrf.count() else ""
    tried: list[tuple[str, dict[str, str | float | bool]]] = [
        ("/actions/drain", {"instance": ENGINE}),
        ("/actions/undrain", {"instance": ENGINE}),
        ("/actions/scale", {"wanted": "3"}),
    ]
    for path, form in tried:
        answer = page.request.post(path, form=form | {"csrf": token or ""}, max_redirects=0)
        assert answer.status in (401, 403), f"{path}: {answer.status}"
    answer = page.request.post(
        "/api/scale", data={"wanted": 3}, headers={"authorization": "Bearer not-the-admin-token"}
    )
    assert answer.status in (401, 403)

    visitor.open("/sign-in")
    page.get_by_label("Admin token").fill("not-the-admin-token")
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#sign-in-error")).to_be_visible()
    assert page.goto("/") is not None
    assert page.get_by_role("button", name="Drain").count() == 0
    assert acts_in(up) == before
    visitor.troubles.clear()  # the refusals


def test_an_engine_is_drained_and_taken_back_by_keyboard(up: RunningUp, console: RunningConsole, visit: Visit) -> None:
    page = visit(console.url).open("/")
    sign_in(page)
    status = page.locator("#engines tr", has_text=ENGINE).locator("td").first

    for act, shown in (("Drain", "draining"), ("Undrain", "ready")):
        go_to(page, "combobox", "Engine")
        page.keyboard.type(ENGINE)
        go_to(page, "button", f"{act} …")
        page.keyboard.press("Enter")
        page.wait_for_url("**act=**")
        go_to(page, "button", f"{act} {ENGINE}")
        page.keyboard.press("Enter")
        page.wait_for_url("**done=**")
        expect(status).to_have_text(shown)

    acts = [(act["type"], act["instance"]) for act in acts_in(up) if act["type"] != "ScaleDecided"]
    assert acts == [("InstanceDraining", ENGINE), ("InstanceUndrained", ENGINE)]
    assert all(act["by"] for act in acts_in(up))


def test_the_pool_is_scaled_and_the_history_says_who_asked(
    up: RunningUp, console: RunningConsole, visit: Visit
) -> None:
    page = visit(console.url).open("/")
    sign_in(page)

    go_to(page, "spinbutton", "Engines wanted")
    page.keyboard.press("Control+A")
    page.keyboard.type("3")
    go_to(page, "button", "Scale …")
    page.keyboard.press("Enter")
    page.wait_for_url("**act=scale**")
    go_to(page, "button", "Scale to 3")
    page.keyboard.press("Enter")
    page.wait_for_url("**done=**")

    expect(page.locator("#scaling tr", has_text="2 → 3").first).to_be_visible(timeout=FLEET_MILLISECONDS_MAX)
    by = [act["by"] for act in acts_in(up) if act["type"] == "ScaleDecided" and act["wanted"] == 3]
    assert by
    expect(page.locator("#scaling tr", has_text="2 → 3").first).to_contain_text(by[0])


def test_who_signed_out_reads_again(console: RunningConsole, visit: Visit) -> None:
    page = visit(console.url).open("/")
    sign_in(page)
    page.get_by_role("button", name="Sign out").click()

    expect(page.get_by_role("link", name="Sign in to act")).to_be_visible()
    assert page.get_by_role("button", name="Drain").count() == 0
