"""Logs after the fact: `sources` opens any log (`live`, `archive`, `bundle`); `replay`, `state` and `export` are the commands."""
