"""HTML pages of the console, rendered by the server. `render` gives a whole page; `parts` what of it changes while somebody
looks: each template block named live_x is the content of the element with id live-x, and each table's rows. Both come from
the same blocks and columns. Autoescaped; a text from outside is one line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from pointsman_cli.console.pages import charts, columns
from pointsman_cli.console.pages.cells import FUNCTIONS, NOTHING, text
from pointsman_cli.console.pages.context import values_of_page
from pointsman_cli.console.pages.live import Parts, Row
from pointsman_cli.console.pages.tables import Table
from pointsman_cli.console.views import Session, StatusView

TEMPLATES = Path(__file__).with_name("templates")
LIVE_BLOCK = "live_"
BASE = "base.html"
MACROS = ("verdict", "empty", "csrf", "options")
MENU = (
    (("/", "fleet", "Fleet"), ("/requests", "requests", "Requests"), ("/doctor", "doctor", "Findings")),
    (("/history", "history", "Scaling and moves"), ("/tenants", "tenants", "Tenants"), ("/hit-rate", "hit_rate", "Hit rate")),
    (("/what-if", "what_if", "What-if"), ("/shadow", "shadow", "Shadow policies")),
)  # fmt: skip
PATHS = {name: path for group in MENU for path, name, _ in group}
SECTIONS = {"request": "requests", "what_if_run": "what_if"}
"""Pages below another one in the menu."""
TITLES = {name: label for group in MENU for _, name, label in group} | {
    "request": "Request", "what_if_run": "What-if", "api": "API", "sign_in": "Sign in", "problem": "Problem",
}  # fmt: skip
FOLLOWING = frozenset(PATHS)
"""Pages that change as the log goes on. Others of LIVE change while something is worked out, also of a recorded log."""
LIVE = FOLLOWING | {"request", "what_if_run"}
UNDER_WAY = frozenset({"waiting", "running"})
PASSING = frozenset({"act", "engine", "done", "refused", "sort", "order"})
"""Of a query: no part of what changes. Rows of a sorted table keep their place while their numbers change."""
TABLES: Mapping[str, Sequence[tuple[Table[Any], str]]] = {
    "fleet": ((columns.FLEET, "instances"),),
    "requests": ((columns.REQUESTS, "requests"),),
    "tenants": ((columns.TENANTS, "tenants"),),
    "history": ((columns.SCALING, "scaling"), (columns.MOVES, "moves"), (columns.EVENTS, "events")),
}
"""Tables of a page, each with the field of the view that has its rows."""
Query = Mapping[str, str]


class Pages:
    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=lambda value: value if isinstance(value, Markup) else text(value),
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        macros = self._environment.get_template("macros.html")
        self._environment.globals.update(FUNCTIONS)
        self._environment.globals.update(
            phase_bar=charts.phase_bar,
            stacked=charts.stacked,
            rung_bar=charts.rung_bar,
            menu=MENU,
            NOTHING=NOTHING,
        )
        self._environment.globals.update({name: getattr(macros.module, name) for name in MACROS})

    def render(
        self, page: str, view: Any, *, status: StatusView, session: Session | None = None, query: Query | None = None
    ) -> str:
        """A whole page. It is live if the log is and no earlier moment was asked for."""
        values = self._values(page, view, status, session or Session(), query or {})
        rows = _rows(page, view, values["query"])
        values["tables"] = {
            table.key: table.html(rows[table.key], PATHS[page], values["query"]) for table, _ in TABLES.get(page, ())
        }
        return self._template(page).render(values)

    def parts(self, page: str, view: Any, *, status: StatusView, query: Query | None = None) -> Parts:
        """What changes of a live page, without a session: the same parts go to all viewers."""
        values = self._values(page, view, status, Session(), query or {})
        fragments: dict[str, str] = {}
        for template in (self._environment.get_template(BASE), self._template(page)):
            context_of = template.new_context(values)
            for name, block in template.blocks.items():
                if name.startswith(LIVE_BLOCK):
                    fragments[name.replace("_", "-")] = "".join(block(context_of)).strip()
        fragments["announce"] = fragments.pop("live-announce", "")
        return Parts(fragments, _rows(page, view, values["query"]))

    def _template(self, page: str) -> Template:
        return self._environment.get_template(f"{page}.html")

    def _values(self, page: str, view: Any, status: StatusView, session: Session, query: Query) -> dict[str, Any]:
        values: dict[str, Any] = {
            "view": view, "status": status, "session": session, "query": query,
            "title": TITLES[page], "section": SECTIONS.get(page, page), "live": "", "pausable": False,
        }  # fmt: skip
        working = page in LIVE and (getattr(view, "state", "") in UNDER_WAY or getattr(view, "busy", False))
        values["reading"] = working
        if working or (page in FOLLOWING and status.health != "recorded" and not query.get("at")):
            shown = {name: value for name, value in query.items() if name not in PASSING}
            address = _path(page, view) + (f"?{urlencode(shown)}" if shown else "")
            values["pausable"] = page in FOLLOWING and status.health != "recorded"
            values["live"] = f"/live?page={quote(address, safe='')}"
        return values | values_of_page(page, view, status, session, query)


def _path(page: str, view: Any) -> str:
    match page:
        case "request":
            return f"/requests/{quote(view.request, safe='')}"
        case "what_if_run":
            return f"/what-if/{view.id}"
        case _:
            return PATHS[page]


def _rows(page: str, view: Any, query: Query) -> dict[str, list[Row]]:
    return {table.key: table.rows(getattr(view, field), query) for table, field in TABLES.get(page, ())}
