"""A simulated vLLM engine: vLLM's HTTP and KV events outside, `simulation.engine_model` on a scaled clock inside.

`server` puts the parts together; `app` answers HTTP with `openai_bodies` and `answers`; `engine` drives the model in
real time; `kv_events` publishes what its cache does; `wording` is what it says.
"""
