"""The command `pointsman-engine-sim`."""

from functools import partial

import click

from pointsman.adapters.tokenizer import TokenizerLoadError
from pointsman.runtime.environment_names import start_logs
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import Supervisor, run
from pointsman_engine_sim.server import check, engine_server
from pointsman_engine_sim.settings import EngineSimSettings


@command(EngineSimSettings, name="pointsman-engine-sim", table="engine-sim")
def main(settings: EngineSimSettings) -> None:
    """A simulated vLLM engine: its HTTP interface, its KV events on ZMQ, its batching, its prefix cache, its times.

    What it says is made of words of the tokenizer's vocabulary, always the same for the same prompt. There is no end
    of sequence: each answer has exactly max_tokens tokens (16 for a completion and 128 for a chat when the request
    does not say) and finish_reason "length"; stop strings and sampling parameters have no effect.

    `POST /sim/misbehave` with {"kind": "errors"}, {"kind": "hang"} or {"kind": "slow", "factor": 10} makes it fail while its
    /health and /metrics are well; {"kind": ""} ends that.

    \b
    Example, with KV events on free ports (the log says which):
      pointsman-engine-sim --port 8000 --speed 10 --kv-events-config '{"enable_kv_cache_events": true,
        "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}'
    """
    try:
        check(settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    start_logs(settings)
    run(partial(_serve, settings))


async def _serve(settings: EngineSimSettings, supervisor: Supervisor) -> None:
    try:
        async with engine_server(settings, supervisor):
            await supervisor.until_stopped()
    except (TokenizerLoadError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
