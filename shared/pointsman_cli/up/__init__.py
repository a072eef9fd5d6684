"""`pointsman up`: `settings` and `addresses` are the input, `plan` and `processes` are pure, `command` checks the
machine, `session` runs the fleet with `runner`, `child` and `display`."""
