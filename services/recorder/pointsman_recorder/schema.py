"""The archive's SQL: tables of all log entries, and a view with a row per request. A *log* here is one unbroken history:
the stream's identity, with `#2`, `#3`... after the log went back and reused sequences."""

from typing import Any, get_args

import sqlalchemy as sa

from pointsman.contracts.decisions import RequestEnd

ORDINARY_NUMBER = "^-?[0-9]{1,31}(?:[.][0-9]{1,60})?(?:[eE][-+]?[0-9]{1,2})?$"
"""What `double precision` always holds. JSON may also say 1e-400, which the codec reads as 0 and PostgreSQL refuses."""
UNKNOWN_TOKENS = -1
metadata = sa.MetaData()

logs = sa.Table(
    "logs",
    metadata,
    sa.Column("log", sa.String(96), primary_key=True, comment="name of one unbroken history"),
    sa.Column("identity", sa.String(80), nullable=False, comment="the stream's creation time"),
    sa.Column("branch", sa.Integer, nullable=False, comment="1, and one more each time the stream went back"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("log", sa.String(96), primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Float(53), nullable=False, comment="engine seconds since the Unix epoch"),
    sa.Column("type", sa.String(64), nullable=False),
    sa.Column("subject", sa.String(255), nullable=False),
    sa.Column("instance", sa.String(64)),
    sa.Column("request", sa.String(64)),
    sa.Column("payload", sa.Text, nullable=False, comment="the event as JSON, as it was in the log"),
    sa.Index("events_by_request", "request"),
    sa.Index("events_by_type", "type", "at"),
    sa.Index("events_by_instance", "instance", "at"),
)

dead_letters = sa.Table(
    "dead_letters",
    metadata,
    sa.Column("log", sa.String(96), primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("subject", sa.String(255), nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Column("problem", sa.Text, nullable=False),
)

gaps = sa.Table(
    "gaps",
    metadata,
    sa.Column("log", sa.String(96), primary_key=True, comment="the history that goes on at `sequence`"),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("after_log", sa.String(96), nullable=False),
    sa.Column("after_sequence", sa.BigInteger, nullable=False, comment="last entry archived before; 0 for none"),
    sa.Column("reason", sa.Text, nullable=False),
)

ENTRY_TABLES = (events, dead_letters)
"""Each entry is in one of them."""
ENDS = tuple(end.__name__ for end in get_args(RequestEnd))


def requests_view(dialect: sa.Dialect) -> str:
    """Its definition, as it stands behind CREATE."""
    return f"VIEW requests AS {_requests(dialect).compile(dialect=dialect, compile_kwargs={'literal_binds': True})}"


def _requests(dialect: sa.Dialect) -> sa.Select[Any]:
    """One row per request and log: request, placement, end. `ends` is 1 in a healthy log. `ttft` is the ingress's: of an answer
    that is not streamed its whole time. What a leader only assumed (its PrefillFinished has a stamp) is in no column."""

    def word(kind: str, name: str) -> sa.ColumnElement[Any]:
        return sa.func.max(sa.case((events.c.type == kind, _payload(dialect)[name].as_string())))

    def number(kind: str, name: str) -> sa.ColumnElement[Any]:
        return sa.func.max(sa.case((events.c.type == kind, _number(dialect, name))))

    def tokens(name: str) -> sa.ColumnElement[Any]:
        """As the engine counted."""
        return sa.func.nullif(number("RequestFinished", name), UNKNOWN_TOKENS)

    def at(*kinds: str) -> sa.ColumnElement[Any]:
        return sa.func.max(sa.case((events.c.type.in_(kinds), events.c.at)))

    def count(*kinds: str) -> sa.ColumnElement[Any]:
        return sa.func.count(sa.case((events.c.type.in_(kinds), events.c.sequence)))

    seen = sa.and_(events.c.type == "PrefillFinished", _payload(dialect)["stamp"].as_string().is_(None))
    first_token_after = sa.func.max(sa.case((seen, _number(dialect, "ttft"))))

    return (
        sa.select(
            events.c.log,
            events.c.request,
            word("RequestArrived", "tenant").label("tenant"),
            number("RequestArrived", "arrived_at").label("arrived_at"),
            number("RequestArrived", "slo_ttft").label("slo_ttft"),
            sa.func.coalesce(tokens("prompt_tokens"), number("RequestArrived", "prompt_tokens")).label("prompt_tokens"),
            word("RequestPlaced", "policy").label("policy"),
            at("RequestPlaced").label("placed_at"),
            number("RequestPlaced", "predicted_ttft").label("predicted_ttft"),
            at("RequestGranted").label("granted_at"),
            word("RequestGranted", "instance").label("granted_instance"),
            word("RequestFinished", "instance").label("instance"),
            sa.func.max(sa.case((seen, events.c.at))).label("first_token_at"),
            sa.func.coalesce(number("RequestFinished", "ttft"), first_token_after).label("ttft"),
            number("RequestFinished", "tpot").label("tpot"),
            number("RequestFinished", "e2e").label("e2e"),
            tokens("cached_tokens").label("cached_tokens"),
            tokens("completion_tokens").label("completion_tokens"),
            sa.func.max(sa.case((events.c.type.in_(ENDS), events.c.type))).label("end_type"),
            at(*ENDS).label("ended_at"),
            count("RequestPlaced").label("placements"),
            count("RequestMigrated").label("migrations"),
            count(*ENDS).label("ends"),
        )
        .where(events.c.request.is_not(None))
        .group_by(events.c.log, events.c.request)
    )


def _payload(dialect: sa.Dialect) -> Any:
    """The payload as a JSON expression. In SQLite JSON is text, and a cast would make it a number."""
    return sa.type_coerce(events.c.payload, sa.JSON) if dialect.name == "sqlite" else sa.cast(events.c.payload, sa.JSON)


def _number(dialect: sa.Dialect, name: str) -> sa.ColumnElement[Any]:
    """In PostgreSQL NULL for what is no ORDINARY_NUMBER: one refused row would fail the view for everybody."""
    value = _payload(dialect)[name]
    if dialect.name == "postgresql":
        return sa.cast(sa.func.substring(value.as_string(), ORDINARY_NUMBER), sa.Float(53))
    number: sa.ColumnElement[Any] = value.as_float()
    return number
