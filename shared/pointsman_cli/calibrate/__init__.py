"""`pointsman calibrate`: `measuring` times prompts on an engine, `fitting` fits the cost model."""
