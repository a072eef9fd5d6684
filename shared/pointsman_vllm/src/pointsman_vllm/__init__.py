"""What Pointsman brings into a vLLM engine: another eviction for its prefix cache, another order for its queue.

Two things, each for itself, neither on by default: randomised leaf token (`POINTSMAN_VLLM_EVICTION=rlt`, put in by
`plugin`) and deficit longest prefix match (`--scheduler-cls pointsman_vllm.dlpm.DlpmScheduler`). This package runs in an
engine's environment, where nothing else of Pointsman is installed, and so it imports nothing of it. Only `plugin`,
`block_pool`, `dlpm` and `internals` touch vLLM; the rest is plain Python that can be tested without an engine.
"""
