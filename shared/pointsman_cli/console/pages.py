"""Placeholder until the pages are there: the views as text."""

from html import escape

import msgspec

from pointsman_cli.console.live import Parts
from pointsman_cli.console.views import Session, StatusView, View


class Pages:
    def render(self, name: str, view: View, *, status: StatusView, session: Session, query: dict[str, str]) -> str:
        _ = status, session, query
        content = escape(msgspec.json.format(msgspec.json.encode(view), indent=1).decode())
        return f"<!doctype html><html lang=en><title>{escape(name)}</title><pre>{content}</pre></html>"

    def parts(self, name: str, view: View, *, status: StatusView, query: dict[str, str]) -> Parts:
        _ = name, status, query
        return Parts({"view": escape(msgspec.json.encode(view).decode())}, {})
