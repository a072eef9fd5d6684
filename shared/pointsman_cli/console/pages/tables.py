"""A table of a page, declared by its columns. Sorting is done by the server (`?sort=COLUMN&order=desc`), so it works without
JavaScript. Rows keep their place while numbers change, so what a stream changes is in the order of the view."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from markupsafe import Markup

from pointsman_cli.console.pages.live import Row

T = TypeVar("T")
NUMBER = "n"


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """`value` is what it is sorted by; without one it is not. `css`: classes of the cell, `n` for numbers."""

    key: str
    title: str
    cell: Callable[[T], Markup]
    value: Callable[[T], Any] | None = None
    css: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Generic[T]):
    """`identity`: of a row, unique. `level`: how far a row asks for attention. `note`: what the columns mean."""

    key: str
    caption: str
    columns: Sequence[Column[T]]
    identity: Callable[[T], str]
    level: Callable[[T], str] = lambda _: ""
    fixed: bool = True
    """Widths of columns follow from the stylesheet, not from what is in them."""

    def rows(self, items: Sequence[T], query: Mapping[str, str]) -> list[Row]:
        return [
            Row(self.identity(item), self.level(item), tuple([str(column.cell(item)) for column in self.columns]))
            for item in self._sorted(items, query)
        ]

    def html(self, rows: Sequence[Row], path: str, query: Mapping[str, str]) -> Markup:
        """The whole table. Row headers are in the first column. Roles are said, since the stylesheet lays rows out by itself
        and browsers differ in what they then tell a screen reader."""
        fixed = " fixed" if self.fixed else ""
        parts = [f'<table class="t-{self.key}{fixed}" role="table"><caption class="vh">{self.caption}</caption>']
        parts.append('<thead role="rowgroup"><tr role="row">')
        parts += [self._heading(column, path, query) for column in self.columns]
        parts.append(f'</tr></thead><tbody id="{self.key}" role="rowgroup">')
        parts += [row_html(row, self.classes) for row in rows]
        parts.append("</tbody></table>")
        return Markup("".join(parts))  # cells are escaped

    @property
    def classes(self) -> list[str]:
        return [column.css for column in self.columns]

    def _sorted(self, items: Sequence[T], query: Mapping[str, str]) -> Sequence[T]:
        chosen = next((c for c in self.columns if c.key == query.get("sort") and c.value), None)
        if chosen is None or chosen.value is None:
            return items
        value = chosen.value
        known = [item for item in items if value(item) is not None]
        unknown = [item for item in items if value(item) is None]
        return sorted(known, key=value, reverse=query.get("order") == "desc") + unknown

    def _heading(self, column: Column[T], path: str, query: Mapping[str, str]) -> str:
        hint = Markup(' title="{}"').format(column.hint) if column.hint else ""
        css = f' class="{column.css} c-{column.key}"'
        if column.value is None:
            return f'<th scope="col" role="columnheader"{css}{hint}>{column.title}</th>'
        current = query.get("sort") == column.key
        descending = query.get("order") == "desc"
        now = f' aria-sort="{"descending" if descending else "ascending"}"' if current else ""
        first = "desc" if NUMBER in column.css.split() else "asc"
        following = ("asc" if descending else "desc") if current else first
        others = {name: value for name, value in query.items() if name not in {"sort", "order", "act", "engine"}}
        address = Markup("{}?{}").format(path, urlencode(others | {"sort": column.key, "order": following}))
        return f'<th scope="col" role="columnheader"{css}{now}{hint}><a href="{address}">{column.title}</a></th>'


def row_html(row: Row, classes: Sequence[str]) -> str:
    cells = [
        f'<th scope="row" role="rowheader" class="{css}">{html}</th>'
        if not i
        else f'<td role="cell" class="{css}">{html}</td>'
        for i, (html, css) in enumerate(zip(row.cells, classes, strict=True))
    ]
    level = f' data-level="{row.level}"' if row.level else ""
    return f'<tr role="row" id="{Markup.escape(row.key)}"{level}>{"".join(cells)}</tr>'
