"""The log line of an admin command: who, what, and what came of it."""

import structlog

log = structlog.get_logger()


def log_admin_action(action: str, by: str, refusal: str, **details: object) -> None:
    log.info("admin_action", action=action, by=by, outcome=refusal or "done", **details)
