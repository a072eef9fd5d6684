"""`pointsman up`: `settings` and `addresses` are its input, `plan` turns them into processes (pure), `command` checks the machine,
`session` runs the fleet with `runner`, `child` and `display`."""
