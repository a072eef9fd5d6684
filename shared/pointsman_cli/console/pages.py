"""HTML pages of the console, rendered by the server. `render` gives a whole page; `parts` what of it changes while somebody
looks: each template block named live_x is the content of the element with id live-x, and each table's rows. Both come from
the same blocks and columns. Autoescaped; a text from outside is one line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from pointsman_cli.console import charts, columns
from pointsman_cli.console.cells import FUNCTIONS, text
from pointsman_cli.console.context import values_of_page
from pointsman_cli.console.live import Parts, Row
from pointsman_cli.console.tables import Table
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
LIVE = frozenset(PATHS) | {"what_if_run"}
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
            finalize=_finalized,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        macros = self._environment.get_template("macros.html")
        self._environment.globals.update(FUNCTIONS)
        self._environment.globals.update(
            phase_bar=charts.phase_bar, stacked=charts.stacked, rung_bar=charts.rung_bar, short=columns.short, menu=MENU
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

    def parts(
        self, page: str, view: Any, *, status: StatusView, session: Session | None = None, query: Query | None = None
    ) -> Parts:
        """What changes of a live page. `session` is that of nobody: the same parts go to all viewers."""
        values = self._values(page, view, status, session or Session(), query or {})
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
            "title": TITLES[page], "section": SECTIONS.get(page, page), "live": "",
        }  # fmt: skip
        if page in LIVE and status.health != "recorded" and not query.get("at"):
            path = PATHS.get(page) or f"/what-if/{view.id}"
            shown = {name: value for name, value in query.items() if name not in {"act", "engine", "done", "refused"}}
            address = f"{path}?{urlencode(shown)}" if shown else path
            values["live"] = f"/live?page={quote(address, safe='')}"
        return values | values_of_page(page, view, status, session, query)


def _rows(page: str, view: Any, query: Query) -> dict[str, list[Row]]:
    return {table.key: table.rows(getattr(view, field), query) for table, field in TABLES.get(page, ())}


def _finalized(value: Any) -> Any:
    return value if isinstance(value, Markup) else text(value)
