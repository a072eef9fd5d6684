"""The exchange with the engine: forwarding, streams, prefill/decode split."""
