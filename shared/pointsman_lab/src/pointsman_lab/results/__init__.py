"""`pointsman-lab results`: runs every study of `docs/results.md`."""
