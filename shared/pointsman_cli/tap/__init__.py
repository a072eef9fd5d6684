"""`pointsman tap`: `command` follows the log, `filters` selects, `event_lines` formats."""
