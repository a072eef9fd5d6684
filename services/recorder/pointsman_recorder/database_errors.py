"""Errors of databases: one that does not answer, one that refuses a value, one that no archive can be in."""

import sqlite3

from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError

DATABASE_ERRORS = (SQLAlchemyError, sqlite3.Error, OSError)
"""What a database raises that does not answer. SQLAlchemy translates no errors of a driver that is used directly."""
SQLSTATE_OF_DATA = "22"
"""Class of the errors about a value. Of asyncpg's errors SQLAlchemy makes no DataError."""
SQLSTATE_NO_TABLE = "42P01"


class UnusableDatabaseError(Exception):
    """No archive can be in this database. The message says what to do."""


class RefusedError(Exception):
    """The database answers, and refuses a value, now and always."""


class SetBackError(Exception):
    """The database lacks what it had confirmed: a replica that was behind took over, a backup was restored, or it
    was made anew."""


def reason_of(error: Exception) -> str:
    """Without the statement and its parameters, which are parts of entries."""
    return f"{type(error).__name__}: {getattr(error, 'orig', None) or error}"


def is_about_data(error: DBAPIError) -> bool:
    return isinstance(error, DataError) or sqlstate(error).startswith(SQLSTATE_OF_DATA)


def is_about_a_lost_table(error: DBAPIError) -> bool:
    return sqlstate(error) == SQLSTATE_NO_TABLE or str(error.orig).startswith("no such table")


def sqlstate(error: DBAPIError) -> str:
    """Empty for SQLite."""
    return str(getattr(error.orig, "sqlstate", ""))
