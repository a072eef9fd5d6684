"""`pointsman calibrate`: `measuring` sends prompts to an engine and times them, `fitting` fits the cost model."""
