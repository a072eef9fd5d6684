"""`pointsman tap`: `command` reads and prints, `filters` selects, `event_lines` formats."""
