"""`pointsman usage`: `accounting` counts what a log says, `command` prints it."""
