"""`pointsman explain`: `lookup` finds the request, `timeline` gathers its events and decisions, `diagnosis` gives the reasons,
`page` shows all of it."""
