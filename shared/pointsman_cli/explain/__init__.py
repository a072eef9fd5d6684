"""`pointsman explain`: `lookup` finds the request, `timeline` collects events and decisions, `diagnosis` explains."""
