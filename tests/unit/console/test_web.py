"""The console over real sockets: what each page and each part of the API answers, and what nobody may do."""

import asyncio
import html
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import pytest_asyncio

from pointsman.adapters.clocks import ScaledClock
from pointsman.policies.policy_set import policy_set
from pointsman.runtime.health import HealthBoard, HttpServer
from pointsman.runtime.http_protocol import HttpLimits
from pointsman_cli.console.command import HTTP_LIMITS
from pointsman_cli.console.jobs.jobs import Jobs
from pointsman_cli.console.jobs.simulations import run_of
from pointsman_cli.console.jobs.views import WhatIfChange
from pointsman_cli.console.log.recorded import RecordedLog
from pointsman_cli.console.page_views import PageViews
from pointsman_cli.console.web import exchange
from pointsman_cli.console.web.actions import Actions
from pointsman_cli.console.web.api import READS
from pointsman_cli.console.web.exchange import FORM
from pointsman_cli.console.web.security import BODY_BYTES_MAX, COOKIE, FAILURES_MAX, HEADERS, Guard
from pointsman_cli.console.web.site import PAGES, Site
from pointsman_cli.console.web.viewers import VIEWERS_MAX, Viewers
from pointsman_cli.history.bundle import BundleHistory
from pointsman_cli.history.sources import open_history
from pointsman_cli.history.time_options import Moment
from tests.support.commands import told_by, written
from tests.support.recorded_log import RecordedFleet
from tests.support.waiting import eventually

TOKEN = "an-admin-token-of-a-test"
CHANGING = ["/actions/drain", "/actions/undrain", "/actions/scale"]


@dataclass
class Served:
    url: str
    console: PageViews
    client: aiohttp.ClientSession
    guard: Guard

    async def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
        return await self._ask("GET", path, headers=headers)

    async def post(
        self, path: str, form: dict[str, str] | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        return await self._ask("POST", path, data=form or {}, headers=headers)

    async def _ask(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, str], str]:
        options["headers"] = {name.replace("_", "-"): value for name, value in options["headers"].items()}
        async with self.client.request(method, self.url + path, allow_redirects=False, **options) as answer:
            return answer.status, dict(answer.headers), await answer.text()

    async def visit(self) -> tuple[str, str]:
        """The cookie of a new browser, and the CSRF token of its pages."""
        _, headers, page = await self.get("/what-if")
        cookie = headers["Set-Cookie"].partition(";")[0]
        return cookie, page.partition('name="csrf" value="')[2].partition('"')[0]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = RecordedFleet(policy_set(), seed=7).live(900).write_all().entries
    return written(entries, tmp_path_factory.mktemp("console"))


@pytest.fixture(scope="module")
def source(bundle: Path) -> RecordedLog:
    source = RecordedLog(BundleHistory(bundle), board=HealthBoard(pool="default"), until=Moment())
    asyncio.run(source.run())
    return source


@pytest_asyncio.fixture
async def served(bundle: Path, source: RecordedLog) -> AsyncIterator[Served]:
    clock = ScaledClock()
    jobs = Jobs(str(bundle), None, recorded=True, wall=lambda: float(clock.wall()))
    console = PageViews(source, Actions(None), jobs)
    guard = Guard(lambda: float(clock.wall()), admin_token=TOKEN)
    site = Site(console, guard, source.board, lambda parts: Viewers(parts, clock))
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(site.app(), host="", port=0, listener=listener, limits=HttpLimits(), shutdown_seconds=0.1)
    serving = asyncio.ensure_future(server.serve())
    try:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client:
            yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", console, client, guard)
    finally:
        site.viewers.close()
        await jobs.close()
        server.should_exit = True
        server.hurry()
        await serving
        listener.close()


def of_a_request(served: Served, path: str) -> str:
    newest = next(served.console.source.observer.requests.newest_first()).id
    return path.replace("{id}", newest if "requests" in path else "1")


@pytest.mark.parametrize("path", [path for path in PAGES if path != "/what-if/{id}"])
async def test_every_page_is_there_and_carries_the_guards_headers(served: Served, path: str) -> None:
    status, headers, page = await served.get(of_a_request(served, path))

    assert status == 200
    assert page.startswith("<!doctype html>")
    for name, value in HEADERS.items():
        assert headers[name.title() if name not in headers else name] == value
    assert "<script>" not in page
    assert " onclick=" not in page
    assert "style=" not in page


@pytest.mark.parametrize("path", READS)
async def test_every_answer_of_the_api_is_as_its_description_says(served: Served, path: str) -> None:
    import jsonschema  # type: ignore[import-untyped]  # here, since importing it takes seconds

    _, _, text = await served.get("/api/openapi.json")
    document = json.loads(text)
    status, _, answer = await served.get(of_a_request(served, path))
    if path == "/api/what-if/{id}":
        assert status == 404
        return

    schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]

    assert status == 200
    jsonschema.validate(json.loads(answer), {**schema, "components": document["components"]})


async def test_what_is_not_there_is_told_in_the_form_that_was_asked_for(served: Served) -> None:
    page, api = await served.get("/nothing-here"), await served.get("/api/what-if/77")

    assert (page[0], page[2].startswith("<!doctype html>")) == (404, True)
    assert (api[0], json.loads(api[2])["error"]) == (404, "not_found")


@pytest.mark.parametrize("named", ["a?b", "a#b", "50%41", "a/b", "chat:1 \N{SNOWMAN}"])
async def test_a_request_is_found_by_an_id_of_any_characters(served: Served, named: str) -> None:
    newest = next(served.console.source.observer.requests.newest_first())
    newest.client_request_id = named
    path = f"/requests/{quote(named, safe='')}"

    status, _, page = await served.get(path)
    api = await served.get(f"/api{path}")
    async with served.client.get(f"{served.url}/live?page={quote(path, safe='')}") as live:
        first = await live.content.readuntil(b"\n\n")

    assert (status, f'<span class="id">{newest.id}</span>' in page) == (200, True)
    assert (api[0], json.loads(api[2])["request"]) == (200, newest.id)
    assert json.loads(first.removeprefix(b"data: "))["parts"]


async def test_a_program_that_guesses_is_refused_and_a_browser_there_reads_on(served: Served) -> None:
    statuses = [(await served.post("/api/scale", Authorization="Bearer wrong"))[0] for _ in range(FAILURES_MAX + 2)]

    assert statuses == [401] * FAILURES_MAX + [429] * 2
    assert (await served.get("/api/fleet", Authorization=f"Bearer {TOKEN}"))[0] == 429
    assert (await served.get("/"))[0] == 200


async def test_a_name_that_another_site_gave_our_address_is_refused(served: Served) -> None:
    status, headers, _ = await served.get("/", Host="evil.example")

    assert status == 421
    assert "content-security-policy" in {name.lower() for name in headers}
    assert (await served.get("/livez", Host="console"))[0] == 200


@pytest.mark.parametrize(
    "path", ["/../pages.py", "/..%2fpages.py", "/%2e%2e/views.py", "//etc/passwd", "/live.js/", ""]
)
async def test_only_files_of_the_package_are_static(served: Served, path: str) -> None:
    assert (await served.get("/static" + path))[0] == 404


async def test_a_browser_asks_for_a_static_file_again_and_gets_it_once(served: Served) -> None:
    status, headers, _ = await served.get("/static/live.js")
    again = await served.get("/static/live.js", If_None_Match=headers["Etag"])

    assert (status, again[0], again[2]) == (200, 304, "")


@pytest.mark.parametrize("path", CHANGING)
async def test_nobody_acts_without_the_admin_token(served: Served, path: str) -> None:
    cookie, csrf = await served.visit()

    without_form_token = await served.post(path, {"instance": "engine-1"}, Cookie=cookie)
    not_signed_in = await served.post(path, {"instance": "engine-1", "csrf": csrf}, Cookie=cookie)
    cross_site = await served.post(path, {"csrf": csrf}, Cookie=cookie, Origin="http://evil.example")
    api = await served.post("/api/instances/engine-1/drain", {}, Authorization="Bearer wrong")

    assert [answer[0] for answer in (without_form_token, not_signed_in, cross_site, api)] == [403, 403, 403, 401]


@pytest.mark.parametrize(
    ("authorization", "status", "words"),
    [
        ("Bearer wrong", 401, "is not the admin token"),
        ("Bearer a-reader-token", 403, "only reads"),
        ("", 401, "Authorization: Bearer ADMIN_TOKEN"),
        ("Basic eDp5", 401, "Authorization: Bearer ADMIN_TOKEN"),
    ],
)
@pytest.mark.parametrize("path", ["/api/instances/engine-1/drain", "/api/scale", "/api/doctor", "/api/what-if"])
async def test_a_program_without_the_admin_token_is_told_so_in_words_for_programs(
    served: Served, path: str, authorization: str, status: int, words: str
) -> None:
    served.guard.reader_token = "a-reader-token"
    told, _, answer = await served.post(path, {}, **({"Authorization": authorization} if authorization else {}))

    assert told == status
    assert words in json.loads(answer)["detail"]
    assert "page" not in answer


async def test_a_program_is_told_that_a_console_without_an_admin_token_only_reads(served: Served) -> None:
    served.guard.admin_token = ""
    status, _, answer = await served.post("/api/scale", {}, Authorization=f"Bearer {TOKEN}")

    assert status == 403
    assert "--admin-token-file" in json.loads(answer)["detail"]


async def test_signed_in_a_console_without_credentials_still_changes_nothing(served: Served) -> None:
    cookie, csrf = await served.visit()
    status, headers, _ = await served.post("/sign-in", {"token": TOKEN, "csrf": csrf}, Cookie=cookie)
    assert status == 303
    signed_in = headers["Set-Cookie"].partition(";")[0]
    assert signed_in.startswith(COOKIE)
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    assert signed_in != cookie, "a session that was known before must not begin to act"

    _, _, page = await served.get("/what-if", Cookie=signed_in)
    csrf = page.partition('name="csrf" value="')[2].partition('"')[0]
    _, headers, _ = await served.post("/actions/drain", {"instance": "engine-1", "csrf": csrf}, Cookie=signed_in)

    assert "refused=" in headers["Location"]


async def test_a_wrong_token_signs_nobody_in(served: Served) -> None:
    cookie, csrf = await served.visit()

    status, headers, _ = await served.post("/sign-in", {"token": "wrong", "csrf": csrf}, Cookie=cookie)

    assert status == 403
    assert "Set-Cookie" not in headers


async def test_bodies_are_bounded_and_forms_are_forms(served: Served) -> None:
    cookie, csrf = await served.visit()
    many = {f"f{number}": "x" for number in range(100)}

    too_long = await served.post("/what-if", {"csrf": csrf, "settings": "x" * (BODY_BYTES_MAX + 1)}, Cookie=cookie)
    too_many = await served.post("/what-if", {"csrf": csrf, **many}, Cookie=cookie)
    async with served.client.post(f"{served.url}/what-if", json={"csrf": csrf}, headers={"Cookie": cookie}) as answer:
        no_form = answer.status

    assert (too_long[0], too_many[0], no_form) == (413, 400, 415)


@asynccontextmanager
async def half_sent(served: Served, path: str, *headers: str) -> AsyncIterator[asyncio.StreamReader]:
    """A request whose body of 100 bytes stops after the first."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-type: {FORM}", "content-length: 100", *headers]
    writer.write("\r\n".join([*head, "", "t"]).encode())
    yield reader
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_a_body_that_stops_is_refused_in_time_with_its_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "BODY_WALL_SECONDS", 0.2)
    cookie, _ = await served.visit()
    for path, header in (("/sign-in", f"cookie: {cookie}"), ("/api/what-if", f"authorization: Bearer {TOKEN}")):
        async with half_sent(served, path, header) as reader, asyncio.timeout(9):
            assert (await reader.readline()).split()[1] == b"408"
            await reader.read()  # until it is closed


@pytest.mark.parametrize("path", ["/sign-in", "/what-if", "/actions/drain"])
async def test_a_visitor_that_may_not_change_anything_is_refused_before_its_body(served: Served, path: str) -> None:
    async with half_sent(served, path) as reader, asyncio.timeout(5):
        status = (await reader.readline()).split()[1]
    assert status == b"401"


def test_one_address_does_not_take_all_connections_of_a_console() -> None:
    assert 2 * VIEWERS_MAX <= HTTP_LIMITS.connections_per_address <= HTTP_LIMITS.connections // 2


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400),
        ("[]", 400),
        ('{"policy": 5}', 400),
        ('{"policy": "no_such_policy"}', 409),
        ('{"instances": 1000000}', 409),
        ('{"settings": ["nonsense"]}', 409),
        ("{}", 409),
    ],
)
async def test_a_run_that_cannot_be_is_refused_before_it_starts(served: Served, body: str, status: int) -> None:
    head = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    async with served.client.post(f"{served.url}/api/what-if", data=body, headers=head) as answer:
        assert answer.status == status
    assert served.console.jobs.runs == []


@pytest.mark.parametrize(
    "query",
    [
        "?limit=9999999999999999",
        "?limit=&before=&late=&slowest=&at=&stage=",
        "?late=0&slowest=1&before=7&at=3&stage=finished",
        "?q=" + "x" * 5000,
        "?tenant=%ff%fe",
        "?nothing=known",
    ],
)
async def test_a_query_that_means_something_is_no_error(served: Served, query: str) -> None:
    for path in ("/requests", "/", "/api/requests", "/api/fleet"):
        assert (await served.get(path + query))[0] == 200


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/api/requests?limit=abc", "limit"),
        ("/api/requests?limit=99999999999999999999", "limit"),
        ("/api/requests?before=-1", "before"),
        ("/api/requests?late=zzz", "late"),
        ("/requests?slowest=yes", "slowest"),
        ("/requests?stage=done", "stage"),
        ("/api/fleet?at=-5", "at"),
        ("/?at=zzz", "at"),
        ("/?at=%00", "at"),
        ("/?at=%D9%A3", "at"),
    ],
)
async def test_a_query_without_a_meaning_is_refused_with_its_name(served: Served, path: str, name: str) -> None:
    status, _, answer = await served.get(path)

    assert status == 400
    assert f"query parameter '{name}'" in html.unescape(answer)


@pytest.mark.parametrize("kind", ["/api/requests/", "/requests/"])
async def test_a_request_that_the_log_does_not_have_is_not_there_once_the_log_was_read(
    served: Served, kind: str
) -> None:
    async def is_read() -> bool:
        return (await served.get(f"{kind}nosuch"))[0] != 200

    await eventually(is_read, seconds=30.0, what="the log is read")
    status, _, answer = await served.get(f"{kind}nosuch")

    assert status == 404
    assert "no request nosuch in this log" in answer
    assert (await served.get(of_a_request(served, kind + "{id}")))[0] == 200


async def test_a_page_that_is_watched_begins_whole(served: Served) -> None:
    async with served.client.get(f"{served.url}/live?page=/tenants") as answer:
        assert answer.content_type == "text/event-stream"
        first = await answer.content.readuntil(b"\n\n")

    assert json.loads(first.removeprefix(b"data: "))["parts"]


@pytest.mark.parametrize("page", ["nothing", "/" + "x" * 3000, "//["])
async def test_no_stream_of_what_is_no_page(served: Served, page: str) -> None:
    assert (await served.get(f"/live?page={page}"))[0] == 400


async def test_a_timeline_is_worked_out_beside(served: Served) -> None:
    newest = next(served.console.source.observer.requests.newest_first()).id
    answer: dict[str, Any] = {}
    for _ in range(200):
        answer = json.loads((await served.get(f"/api/requests/{newest}"))[2])
        if answer["state"] in ("done", "failed"):
            break
        await asyncio.sleep(0.1)

    assert answer["state"] == "done", answer["problem"]
    assert answer["timeline"]["request"] == newest
    assert answer["timeline"]["verdict"]


def children() -> set[str]:
    """Processes that this one has started and that still run."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


async def test_one_run_at_a_time_is_simulated_and_a_cancelled_one_leaves_no_process(served: Served) -> None:
    cookie, csrf = await served.visit()
    before = children()

    status, headers, _ = await served.post("/what-if", {"csrf": csrf, "policy": "round_robin"}, Cookie=cookie)
    assert (status, headers["Location"]) == (303, "/what-if/1")
    second = await served.post("/what-if", {"csrf": csrf, "instances": "5"}, Cookie=cookie)
    assert second[0] == 400
    assert json.loads((await served.get("/api/what-if/1"))[2])["state"] == "running"
    assert children() > before

    await served.post("/what-if/1/cancel", {"csrf": csrf}, Cookie=cookie)
    async with asyncio.timeout(10):
        while served.console.jobs.busy:  # noqa: ASYNC110 - a run has no event for its end
            await asyncio.sleep(0.01)

    assert json.loads((await served.get("/api/what-if/1"))[2])["state"] == "cancelled"
    assert children() == before


def test_a_run_has_the_figures_of_the_command(bundle: Path) -> None:
    change = WhatIfChange(policy="round_robin", instances=4)
    steps: list[str] = []
    with open_history(str(bundle)) as history:
        run = run_of(history, change, steps.append)
    told = told_by("what-if", "--from", str(bundle), "--policy", "round_robin", "--instances", "4")

    shown = {row.name: row for row in run.rows}

    assert run.requests == told["requests"]
    assert run.fidelity == told["fidelity"]
    assert run.notes == told["notes"] != []
    assert shown["TTFT P90"].changed == f"{told['changed']['report']['ttft']['p90_s']:.2f} s"
    assert shown["hit rate"].again == f"{told['resimulated']['report']['hit_rate']:.1%}"
    assert steps[0] == "reading the record"
    assert any("run 3 of 3" in step for step in steps)
