"""Settings of `pointsman-engine-sim`, named as in vLLM where it has them."""

from dataclasses import dataclass

from pointsman.bounds import COUNT, POSITIVE
from pointsman.runtime.settings import ProcessSettings, setting
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES


@dataclass(frozen=True, kw_only=True)
class EngineSimSettings(ProcessSettings):
    model: str = setting("pointsman-sim", "Name under which the model is served.")
    lora_modules: tuple[str, ...] = setting(
        (), "NAME=PATH: a LoRA adapter to serve under NAME; the path is never looked at. May be given several times."
    )
    engine_model: str = setting(
        DEFAULT_PROFILE, "Which model on which hardware to take the times and the memory of.", choices=tuple(PROFILES)
    )
    speed: float = setting(
        1.0, "How much faster than real time to run: all times are divided by this.", bounds=POSITIVE
    )
    block_size: int = setting(64, "Tokens in a KV cache block.", bounds=COUNT)
    max_model_len: int = setting(
        131_072, "Longest prompt and output together; lowered to what the cache holds.", bounds=COUNT
    )
    num_gpu_blocks_override: int = setting(0, "Blocks of KV cache; 0 takes what the engine model's memory holds.")
    kv_offloading_size: float = setting(
        0.0,
        "GiB of host memory for KV blocks, from where evicted ones are loaded back, as by vLLM's OffloadingConnector.",
    )
    max_num_batched_tokens: int = setting(
        8192, "Most tokens in one step; longer prefills come in chunks.", bounds=COUNT
    )
    stream_interval: int = setting(1, "Tokens in a streamed chunk; the first and the last come at once.", bounds=COUNT)
    kv_events_config: str = setting(
        "",
        "JSON as vLLM's: enable_kv_cache_events, publisher (zmq), endpoint, replay_endpoint, topic, buffer_steps, hwm. An "
        "endpoint with '*' or '::', ipc:// or inproc:// is bound, any other is connected. Port '*' takes a free one.",
    )
    kv_transfer_config: str = setting(
        "",
        "JSON as vLLM's: kv_connector (any name) and kv_role. With it the engine hands KV caches over and fetches them, as "
        "the `kv_transfer_params` of a request say.",
    )
    kv_transfer_gb_per_s: float = setting(
        12.5, "How fast KV caches are fetched from others, 1e9 bytes a second.", bounds=POSITIVE
    )
    kv_hold_seconds: float = setting(
        30.0,
        "Engine seconds for which a KV cache is kept for another engine to fetch, as by vLLM's NIXL connector.",
        bounds=POSITIVE,
    )
    api_key: str = setting("", "When set, /v1 needs it as bearer token.", secret=True)
    tokenizer: str = setting("", "Directory with tokenizer.json and its chat template; the built-in one if empty.")
    seed: int = setting(0, "Seed of block hashes and generated text.")
    fault_drop_event_batches: int = setting(
        0, "Fault: every N-th batch of KV events is not published but stays in the replay buffer."
    )
    fault_lose_event_batches: int = setting(
        0, "Fault: every N-th batch of KV events is neither published nor in the replay buffer."
    )
