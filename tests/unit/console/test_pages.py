"""Every page renders for every view: whole, with unique ids, without inline script or style, with foreign text escaped."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from typing_extensions import override

from pointsman.contracts.requests import RequestAttemptFailed
from pointsman.primitives import InstanceId, RequestId
from pointsman_cli.console.pages import rendering as pages
from pointsman_cli.console.pages.cells import evidence, prose
from pointsman_cli.console.pages.live import Parts, patch
from pointsman_cli.console.pages.rendering import LIVE, PATHS, TABLES, Pages
from pointsman_cli.console.views import Health, Session
from pointsman_cli.explain.causes import Cause
from tests.support.console_views import (
    EMPTY,
    FULL,
    HOSTILE,
    fleet,
    reading,
    request_page,
    requests,
    run,
    status,
    timeline,
)

PAGES = Pages()
SIGNED_IN = Session(acts=True, csrf="a-token")
VOID = {
    "area",
    "base",
    "br",
    "col",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "path",
    "rect",
    "line",
    "circle",
    "polyline",
    "polygon",
}


class Outline(HTMLParser):
    """Ids, elements, and whether each end tag closes the element that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.text = ""

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    @override
    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)

    @override
    def handle_data(self, data: str) -> None:
        self.text += data


def outline(html: str) -> Outline:
    found = Outline()
    found.feed(html)
    return found


VIEWS = [
    pytest.param(name, samples[name], id=f"{name}-{what}")
    for name in pages.TITLES
    for what, samples in (("full", FULL), ("empty", EMPTY))
]


@pytest.mark.parametrize("health", get_args(Health))
@pytest.mark.parametrize(("page", "view"), VIEWS)
def test_a_page_is_whole_and_well_formed(page: str, view: Any, health: str) -> None:
    html = PAGES.render(page, view, status=status(health, problems=["lost entries"]), session=SIGNED_IN)

    found = outline(html)
    assert not found.wrong
    assert not found.open
    assert len(found.ids) == len(set(found.ids))
    assert [tag for tag, _ in found.elements].count("h1") == 1
    assert [tag for tag, _ in found.elements].count("main") == 1


@pytest.mark.parametrize(("page", "view"), VIEWS)
def test_nothing_is_inline_so_that_the_content_policy_needs_no_exception(page: str, view: Any) -> None:
    for tag, attributes in outline(PAGES.render(page, view, status=status(), session=SIGNED_IN)).elements:
        assert "style" not in attributes
        assert tag != "style"
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "script" or attributes.get("src", "").startswith("/static/")  # type: ignore[union-attr]


@pytest.mark.parametrize(("page", "view"), VIEWS)
def test_labels_and_links_point_to_something(page: str, view: Any) -> None:
    found = outline(PAGES.render(page, view, status=status(), session=SIGNED_IN))

    for _, attributes in found.elements:
        for name in ("for", "aria-labelledby", "aria-describedby"):
            assert not (attributes.get(name) or "") or attributes[name] in found.ids
        if (attributes.get("href") or "").startswith("#"):
            assert (attributes["href"] or "")[1:] in found.ids


def test_a_what_if_run_shows_what_its_simulation_leaves_out() -> None:
    assert "3 requests failed; failures are not simulated" in PAGES.render("what_if_run", run(), status=status())


def hostile(view: Any) -> Any:
    """The same view; every text in it that the log can hold is replaced."""
    kept = {"state", "health", "severity", "kind", "lateness", "rung", "cause", "sequence"}
    if isinstance(view, msgspec.Struct):
        return type(view)(
            **{f: getattr(view, f) if f in kept else hostile(getattr(view, f)) for f in view.__struct_fields__}
        )
    if isinstance(view, list):
        return [hostile(one) for one in view]
    if isinstance(view, dict):
        return {name: value if name in kept else hostile(value) for name, value in view.items()}
    return HOSTILE + view if isinstance(view, str) else view


@pytest.mark.parametrize(("page", "view"), [(name, view) for name, view in FULL.items() if name != "api"])
def test_names_from_the_log_are_text_and_nothing_else(page: str, view: Any) -> None:
    queries = [
        {"q": HOSTILE, "tenant": HOSTILE, "done": HOSTILE, "at": HOSTILE},
        {"act": "drain", "engine": f"{HOSTILE}engine-1", "refused": HOSTILE},
    ]
    for query in queries:
        html = PAGES.render(page, hostile(view), status=hostile(status()), session=SIGNED_IN, query=query)

        found = outline(html)
        assert not [tag for tag, _ in found.elements if tag == "img"]
        assert sum(tag == "script" for tag, _ in found.elements) == 2
        assert not found.wrong
        assert "\u202e" not in html
        assert "49" not in re.findall(r"\{\{.*?\}\}|7\*7|49$", html)


CHANGING = {name: FULL[name] for name in LIVE} | {"request": reading(), "what_if_run": run("running")}


@pytest.mark.parametrize("page", sorted(LIVE))
def test_what_a_stream_changes_is_on_the_page(page: str) -> None:
    view = CHANGING[page]
    found = outline(PAGES.render(page, view, status=status()))
    empty = outline(PAGES.render(page, EMPTY[page], status=status()))

    parts = PAGES.parts(page, view, status=status())

    assert set(parts.fragments) <= set(found.ids)
    assert {*parts.fragments, *parts.tables} <= set(empty.ids), "what comes to an empty page has a place"
    assert {table.key for table, _ in TABLES.get(page, ())} == set(parts.tables)
    for name, rows in parts.tables.items():
        assert {name, *(row.key for row in rows)} <= set(found.ids)
    assert found.elements[[tag for tag, _ in found.elements].index("body")][1]["data-live"]


@pytest.mark.parametrize("page", sorted(LIVE))
def test_a_fragment_is_what_the_page_holds(page: str) -> None:
    html = PAGES.render(page, FULL[page], status=status())

    for fragment in PAGES.parts(page, FULL[page], status=status()).fragments.values():
        assert fragment in html


@pytest.mark.parametrize(("health", "query"), [("recorded", {}), ("live", {"at": "7"})])
def test_a_recorded_log_and_an_earlier_moment_have_no_stream(health: str, query: dict[str, str]) -> None:
    html = PAGES.render("fleet", fleet(3), status=status(health), query=query)

    assert "data-live" not in html


Shown = tuple[dict[str, str], dict[str, list[list[str]]]]


def shown(parts: Parts) -> Shown:
    rows = {name: [[row.key, row.level, *row.cells] for row in rows] for name, rows in parts.tables.items()}
    return parts.fragments, rows


def applied(before: Parts, message: bytes | None) -> Shown:
    """What a browser shows after it: static/live.js in few words."""
    change = msgspec.json.decode(message) if message else {}
    tables: dict[str, list[list[str]]] = {}
    for name, rows in before.tables.items():
        table = change.get("tables", {}).get(name, {})
        cells = {row.key: [row.level, *row.cells] for row in rows} | table.get("rows", {})
        for key, changed in table.get("cells", {}).items():
            for place, html in changed.items():
                cells[key][0 if place == "level" else int(place) + 1] = html
        tables[name] = [[key, *cells[key]] for key in table.get("order", [row.key for row in rows])]
    return before.fragments | change.get("parts", {}), tables


@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("fleet", fleet(20), fleet(20, seed=9)),
        ("fleet", fleet(20), fleet(3)),
        ("fleet", fleet(0), fleet(20)),
        ("requests", requests(50), requests(50, seed=5)),
        ("what_if_run", run("running"), run()),
    ],
)
def test_a_change_makes_the_old_page_the_new_one(page: str, before: Any, after: Any) -> None:
    old, new = PAGES.parts(page, before, status=status()), PAGES.parts(page, after, status=status(sequence=7))

    assert applied(old, patch(old, new)) == shown(new)
    assert applied(old, patch(None, new)) == shown(new)


def test_a_change_holds_only_what_changed() -> None:
    view = fleet(20)
    engines = [*view.instances]
    engines[4] = msgspec.structs.replace(engines[4], pending=977)
    old = PAGES.parts("fleet", view, status=status())
    new = PAGES.parts("fleet", msgspec.structs.replace(view, instances=engines), status=status())

    assert patch(old, old) is None
    assert msgspec.json.decode(patch(old, new) or b"")["tables"] == {"engines": {"cells": {"e-engine-4": {"3": "977"}}}}


def test_a_column_sorts_its_table_and_says_so() -> None:
    found = PAGES.parts("fleet", fleet(30), status=status(), query={"sort": "pending", "order": "desc"}).tables[
        "engines"
    ]
    html = PAGES.render("fleet", fleet(30), status=status(), query={"sort": "pending", "order": "desc", "at": "5"})

    numbers = [int(row.cells[3]) for row in found]
    assert numbers == sorted(numbers, reverse=True)
    assert html.count("aria-sort") == 1
    live = PAGES.render("fleet", fleet(30), status=status(), query={"sort": "pending", "order": "desc"})
    assert 'data-live="/live?page=%2F"' in live
    assert "/?at=5&amp;sort=pending&amp;order=asc" in html


def test_an_earlier_moment_says_so_and_leads_to_its_neighbours() -> None:
    view = msgspec.structs.replace(fleet(3), sequence=3000)

    html = PAGES.render("fleet", view, status=status(), query={"at": "3100"})

    assert "An earlier moment" in html
    assert 'href="/?at=2000">Earlier' in html
    assert 'href="/?at=4000">Later' in html
    assert "An earlier moment" not in PAGES.render("fleet", view, status=status())


def test_actions_are_offered_to_who_may_act_and_asked_twice() -> None:
    view, query = fleet(3), {"act": "drain", "engine": "engine-1"}
    reader, admin = (
        PAGES.render("fleet", view, status=status(), query=query),
        PAGES.render("fleet", view, status=status(), query=query, session=SIGNED_IN),
    )

    assert "/actions/" not in reader
    assert "Sign in to act" in reader
    assert 'action="/actions/drain"' in admin
    assert 'name="instance" value="engine-1"' in admin
    assert "/actions/" not in PAGES.render("fleet", view, status=status(), session=SIGNED_IN)


@pytest.mark.parametrize(
    ("page", "view"), [(name, view) for samples in (FULL, EMPTY) for name, view in samples.items()]
)
def test_every_form_that_changes_something_holds_the_session_s_token(page: str, view: Any) -> None:
    for query in ({}, {"act": "scale", "engine": "4"}, {"act": "drain", "engine": "engine-1"}):
        html = PAGES.render(page, view, status=status(), session=SIGNED_IN, query=query)

        for form in re.findall(r"<form[^>]*post.*?</form>", html, re.DOTALL):
            assert '<input type="hidden" name="csrf" value="a-token">' in form


@pytest.mark.parametrize("cause", Cause)
def test_the_verdict_stands_before_everything_else_of_a_request(cause: Cause) -> None:
    html = PAGES.render("request", request_page(str(cause)), status=status())

    said = outline(html[html.index("<main") :]).text
    assert said.index("Slow because 60,112 tokens") < said.index("Where the time went")
    assert said.count("Slow because 60,112 tokens") == 1


def test_a_request_that_is_still_being_read_shows_what_is_known_and_goes_on() -> None:
    html = PAGES.render("request", reading(), status=status("recorded"))

    assert 'data-live="/live?page=%2Frequests%2F' in html
    assert reading().row.instance in outline(html).text  # type: ignore[union-attr]
    assert "data-live" not in PAGES.render("request", request_page(), status=status())


def test_a_failed_attempt_says_where_and_what() -> None:
    event = RequestAttemptFailed(
        at=1.0, request=RequestId("r"), instance=InstanceId("engine-1"), failure="http_5xx", status=503
    )
    html = PAGES.render("request", request_page(failed_attempts=[event]), status=status())

    assert "attempt 1 failed</span><span>engine-1</span><span" in html
    assert "503 http_5xx" in html


@pytest.mark.parametrize("page", ["sign_in", "problem", "api"])
def test_who_may_not_read_learns_nothing_of_the_fleet(page: str) -> None:
    html = PAGES.render(
        page, FULL[page], status=status("disconnected", pool="secret-pool"), session=Session(reads=False)
    )

    for told_to_readers in ("secret-pool", "nats://", "scheduler-1", "1,284,332"):
        assert told_to_readers not in html


def test_a_number_that_no_pool_has_is_not_asked_for() -> None:
    for engines in ("9" * 5000, "-1", "\N{SUPERSCRIPT TWO}"):
        html = PAGES.render(
            "fleet", fleet(3), status=status(), session=SIGNED_IN, query={"act": "scale", "engine": engines}
        )

        assert "/actions/scale" not in html


def test_the_largest_prompt_ahead_comes_first_of_those_that_are_shown() -> None:
    made = timeline()
    first = made.grants[0].in_engine[0]
    ahead = [replace(first, request=RequestId(f"small-{i}"), uncached_tokens=10 + i) for i in range(20)]
    ahead.append(replace(first, request=RequestId("large"), uncached_tokens=60_000))
    page = request_page(grants=[replace(made.grants[0], in_engine=ahead)], decisions=[])

    said = outline(PAGES.render("request", page, status=status())).text

    assert said.index("large") < said.index("small-19") < said.index("small-18")
    assert "small-2 " not in said


@pytest.mark.parametrize(
    ("sentence", "html"),
    [
        ("slow because `a<b>` is", "Slow because <code>a&lt;b&gt;</code> is"),
        ("engine-3 had work", "engine-3 had work"),
        ("one ` alone", "One ` alone"),
        ("\u202eback", "\N{REPLACEMENT CHARACTER}back"),
    ],
)
def test_a_sentence_has_a_capital_letter_and_code_and_nothing_else(sentence: str, html: str) -> None:
    assert prose(sentence) == html


def test_the_example_of_a_line_of_evidence_is_a_link() -> None:
    assert evidence("100% because <x>: for example request r-1") == (
        '100% because &lt;x&gt;: for example request <a href="/requests/r-1">r-1</a>'
    )
    assert evidence("no example") == "No example"


def test_every_picture_is_told_in_words() -> None:
    found = outline(PAGES.render("request", request_page(), status=status()))

    assert all(attributes.get("aria-hidden") == "true" for tag, attributes in found.elements if tag == "svg")
    assert all(phase.name in found.text for phase in timeline().phases)


def test_every_class_of_a_template_is_in_a_stylesheet() -> None:
    directory = Path(pages.__file__).parent
    styles = "".join(file.read_text() for file in (directory / "static").glob("*.css"))
    html = "".join(PAGES.render(name, FULL[name], status=status(), session=SIGNED_IN) for name in PATHS)
    used = {name for _, attributes in outline(html).elements for name in (attributes.get("class") or "").split()}

    known = set(re.findall(r"\.([a-z][\w-]*)", styles))
    assert {name for name in used if not name.startswith(("c-", "t-"))} - known <= {"nav", "head", "list"}
