"""`pointsman explain`: the story of one request, from a log.

`finding` says which request is meant, `story` gathers what happened to it and what was known when it was decided,
`reasons` says in words why it took as long as it did, and `page` shows all of it.
"""

from pointsman_cli.explain.command import explain_command

__all__ = ["explain_command"]
