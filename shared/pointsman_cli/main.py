"""The command `pointsman`."""

from importlib.metadata import version

import click

from pointsman_cli.lazy_group import LazyGroup

COMMANDS = {
    "up": ("pointsman_cli.up.command", "up_command", "Start a whole fleet here and run it until Ctrl-C."),
    "fleet": ("pointsman_cli.fleet", "fleet_command", "Show the instances of a running fleet."),
    "console": ("pointsman_cli.console.command", "console_command", "Serve a web page of a fleet or a recorded log."),
    "scale": ("pointsman_cli.scale", "scale_command", "Ask for a number of instances, or see how many and why."),
    "drain": ("pointsman_cli.drain", "drain_command", "Take an instance out of service without losing a request."),
    "keys": ("pointsman_cli.keys", "keys_group", "Create, list, rotate and revoke API keys of clients."),
    "tenants": (
        "pointsman_cli.tenants",
        "tenants_command",
        "Show and set limits, priorities and cache groups of tenants.",
    ),
    "credentials": (
        "pointsman_cli.credentials",
        "credentials_command",
        "Write the NATS users of a deployment, each with the least rights.",
    ),
    "tap": ("pointsman_cli.tap.command", "tap_command", "Print the events of the log, live."),
    "replay": (
        "pointsman_cli.history.replay_command",
        "replay_command",
        "Fold a recorded log again, and verify every decision in it.",
    ),
    "state": ("pointsman_cli.history.state_command", "state_command", "Show the fleet as it was known at some moment."),
    "explain": (
        "pointsman_cli.explain.command",
        "explain_command",
        "Show what happened to one request, and why it was slow.",
    ),
    "doctor": ("pointsman_cli.doctor.command", "doctor_command", "Read a log and list what is wrong in it."),
    "hit-rate": (
        "pointsman_cli.hit_rate.command",
        "hit_rate_command",
        "Show how much of the prompts was cached, and where the rest was lost.",
    ),
    "what-if": (
        "pointsman_cli.what_if.command",
        "what_if_command",
        "Run recorded traffic again under another policy or fleet size.",
    ),
    "export": ("pointsman_cli.history.export_command", "export_command", "Write a log into one portable file."),
    "usage": (
        "pointsman_cli.usage.command",
        "usage_command",
        "Report tokens and engine seconds per tenant, model and day.",
    ),
    "calibrate": (
        "pointsman_cli.calibrate.command",
        "calibrate_command",
        "Measure prefill times of an engine, to predict them.",
    ),
    "bench": (
        "pointsman_cli.bench.command",
        "bench_command",
        "Replay a workload against a fleet, or compare policies.",
    ),
    "simulate": (
        "pointsman_cli.simulate.command",
        "simulate_command",
        "Compare policies on a trace or a generated workload, in virtual time.",
    ),
}


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(version("pointsman"), prog_name="pointsman")
def main() -> None:
    """Route LLM requests to the engine that has their prefix cached, and log every decision.

    \b
    Start a fleet of simulated engines:
      pointsman up
    Then, in another terminal:
      pointsman fleet --watch           instances, load, and state of their cache index
      pointsman tap                     events and decisions as they happen
      pointsman bench --workload chat   send requests and report latencies

    Commands use the only fleet of this machine; --from DATA_DIRECTORY or --from nats://HOST selects another.
    """
