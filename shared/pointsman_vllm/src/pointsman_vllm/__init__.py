"""Pointsman's vLLM plug-in, both parts off by default: randomised leaf token eviction (`POINTSMAN_VLLM_EVICTION=rlt`)
and deficit longest prefix match (`--scheduler-cls pointsman_vllm.dlpm.DlpmScheduler`). Imports nothing else of
Pointsman. Only `plugin`, `block_pool`, `dlpm` and `internals` use vLLM."""
