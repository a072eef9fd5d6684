"""Sources of engine targets, one module each: `file`, `dns`, `docker`, `kubernetes`, and `listed` for what settings name."""
