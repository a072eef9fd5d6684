"""A simulated vLLM engine: vLLM's HTTP and KV events outside, `simulation.engine_model` on a scaled clock inside."""
