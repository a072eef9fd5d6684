"""`pointsman explain`: `lookup` finds the request, `timeline` collects its events and decisions, `diagnosis` explains,
`page` prints."""
