"""What a page shows, in parts, and the difference between two moments of it as one message for all its viewers. Pure: the
hub in `api` renders once a second and sends the same bytes to everybody who looks at the page."""

from typing import Any, NamedTuple

import msgspec

Html = str
"""Escaped already."""


class Row(NamedTuple):
    """`key` is the id of its element and unique on the page. `level` colours its edge; the cells say the same in words."""

    key: str
    level: str
    cells: tuple[Html, ...]


class Parts(NamedTuple):
    """`fragments`: content of elements by their id. `tables`: rows of a table's body by its id."""

    fragments: dict[str, Html]
    tables: dict[str, list[Row]]


def patch(before: Parts | None, after: Parts) -> bytes | None:
    """A JSON object for `static/live.js`, or None if both look alike. Without `before`: everything, for a viewer that has
    just come and whose page may be some seconds old."""
    content: dict[str, Any] = {}
    old = before.fragments if before else {}
    if parts := {key: html for key, html in after.fragments.items() if old.get(key) != html}:
        content["parts"] = parts
    tables: dict[str, Any] = {}
    for name, rows in after.tables.items():
        if changed := _rows(before.tables.get(name, []) if before else None, rows):
            tables[name] = changed
    if tables:
        content["tables"] = tables
    return msgspec.json.encode(content) if content else None


def _rows(before: list[Row] | None, after: list[Row]) -> dict[str, Any]:
    """`order`: keys of all rows if they are others or in another order. `rows`: new ones, whole. `cells`: changed cells of
    the others by row and position; position `level` is the row's level."""
    known = {row.key: row for row in before} if before else {}
    new: dict[str, list[Any]] = {}
    changed: dict[str, dict[str, str]] = {}
    for row in after:
        old = known.get(row.key)
        if old is None:
            new[row.key] = [row.level, *row.cells]
        elif old != row:
            cells = {str(i): html for i, html in enumerate(row.cells) if html != old.cells[i]}
            changed[row.key] = cells if old.level == row.level else cells | {"level": row.level}
    content: dict[str, Any] = {}
    if before is None or [row.key for row in before] != [row.key for row in after]:
        content["order"] = [row.key for row in after]
    if new:
        content["rows"] = new
    if changed:
        content["cells"] = changed
    return content
