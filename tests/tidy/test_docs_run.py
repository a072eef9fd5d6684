"""Every command line and configuration block of the documentation is parsed as a user's would be, without being run."""

import ast
import dataclasses
import functools
import importlib.util
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are not worth a dependency

from pointsman.adapters.discovery.file import parse_engines
from pointsman.adapters.tenants_file import parse_tenant_policies, with_changes
from pointsman.contracts.decisions import Settings
from pointsman.contracts.tenants import TenantPolicies
from pointsman.policies.admission import ADMISSION_POLICIES, DEFAULT_ADMISSION
from pointsman.policies.ordering import DEFAULT_ORDERING, ORDERING_POLICIES
from pointsman.policies.policy_set import UnknownPolicyError, policy_set, rebalancing_policy, scaling_policy
from pointsman.policies.rebalancing import DEFAULT_REBALANCING, REBALANCING_POLICIES
from pointsman.policies.routing import DEFAULT_ROUTING, ROUTING_POLICIES
from pointsman.policies.scaling import DEFAULT_SCALING, SCALING_POLICIES
from pointsman.policies.setting_text import SettingTextError, parts_of
from pointsman.runtime.settings import SecretOption
from pointsman_cli.console.command import console_command
from pointsman_cli.main import main as pointsman
from pointsman_cli.up.command import up_command
from pointsman_engine_sim.main import main as engine_sim
from pointsman_ingress.main import main as ingress
from pointsman_lab.main import main as pointsman_lab
from pointsman_rebalancer.main import main as rebalancer
from pointsman_recorder.main import main as recorder
from pointsman_scaler.main import main as scaler
from pointsman_scheduler.main import main as scheduler
from pointsman_vllm.settings import FairnessSettings
from pointsman_worker.main import main as worker
from tests.tidy.pages import PAGES, ROOT, blocks, examples, our_commands, spans

SERVICES: Mapping[str, click.Command] = {
    "engine-sim": engine_sim,
    "ingress": ingress,
    "rebalancer": rebalancer,
    "recorder": recorder,
    "scaler": scaler,
    "scheduler": scheduler,
    "worker": worker,
}
TABLES: Mapping[str, click.Command] = {**SERVICES, "up": up_command, "console": console_command}
COMMANDS: Mapping[str, click.Command] = {
    "pointsman": pointsman,
    "pointsman-lab": pointsman_lab,
    **{f"pointsman-{name}": command for name, command in SERVICES.items()},
}
POLICIES: Mapping[str, Collection[str]] = {
    "routing": ROUTING_POLICIES,
    "admission": ADMISSION_POLICIES,
    "order": ORDERING_POLICIES,
    "rebalance": REBALANCING_POLICIES,
    "scaling": SCALING_POLICIES,
}
DEFAULTS = {
    "routing": DEFAULT_ROUTING,
    "admission": DEFAULT_ADMISSION,
    "order": DEFAULT_ORDERING,
    "rebalance": DEFAULT_REBALANCING,
    "scaling": DEFAULT_SCALING,
}
UNCHECKED_KINDS = {"nats", "linear_score"}
"""`up` checks the first itself; the second is the policy that a reader of CONTRIBUTING.md writes."""
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|P\+D|.*(\.\.\.|DIR|NAME|URL|HOST|VALUE|POOL).*")
FOREIGN_OPTIONS = {
    "--allowed-media-domains",
    "--api-key",
    "--chat-template",
    "--data-parallel-size",
    "--enable-auto-tool-choice",
    "--enable-cache-report",
    "--enable-lora",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enable-scale-out",
    "--enable-force-include-usage",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--host",
    "--kv-cache-dtype",
    "--kv-events-config",
    "--kv-transfer-config",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-queued-reqs",
    "--max-num-queued-tokens",
    "--max-num-seqs",
    "--no-enable-prefix-caching",
    "--otlp-traces-endpoint",
    "--profile",
    "--runner",
    "--scheduler-cls",
    "--scheduling-policy",
    "--served-model-name",
    "--signal",
    "--sse-keep-alive-interval",
    "--tool-call-parser",
    "--volumes",
}
"""Of vLLM, SGLang, Docker and others."""
OPTIONS_OF_INSTALLERS = {"--clear", "--disable-pip-version-check", "--no-deps"}
OPTION = re.compile(r"(?<![\w-])--[a-z](?:[a-z-]*[a-z])?\b(?!-)")

HISTORY = "CHANGELOG.md"
"""Names what is gone."""
EXAMPLES = {"shared/pointsman/policies/routing/linear_score.py"}
"""Files that a reader of CONTRIBUTING.md writes."""


class RefusedError(Exception):
    """A documented command line or configuration that our own parsers do not take."""


WRONG = (RefusedError, UnknownPolicyError, SettingTextError)


def resolved(words: Sequence[str]) -> tuple[click.Command, list[str]]:
    """The command that these words run, through its groups, and what is left for it. Raises RefusedError."""
    command, rest = COMMANDS.get(words[0]), list(words[1:])
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        command = command.get_command(click.Context(command), rest.pop(0))
    if command is None:
        raise RefusedError("no such command")
    return command, rest


def parsed(words: Sequence[str], *, whole: bool) -> dict[str, Any]:
    """Values of the options and arguments on a command line, converted by their types; defaults for the others.

    A value in capitals is a placeholder. `whole`: required parameters must be there. Raises RefusedError.
    """
    command, rest = resolved(words)
    context = click.Context(command)
    try:
        given, extra, _ = command.make_parser(context).parse_args(_with_last_value(command, rest, whole=whole))
        if extra and not isinstance(command, click.Group):
            raise RefusedError(f"takes no {extra}")
        values = {p.name or "": _value(p, context, given.get(p.name or "")) for p in command.params}
    except click.UsageError as error:
        raise RefusedError(error.format_message()) from error
    missing = [p.name for p in command.params if whole and p.required and p.value_is_missing(given.get(p.name or ""))]
    if missing and "help" not in given:
        raise RefusedError(f"needs {missing}")
    return values


def _with_last_value(command: click.Command, words: Sequence[str], *, whole: bool) -> list[str]:
    """A sentence may name an option without its value: `pointsman up --rebalance`."""
    takes_value = {name for p in command.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
    ends_early = not whole and bool(words) and words[-1] in takes_value
    elided = [w for before, w in zip(["", *words], words, strict=False) if w != "..." or before in takes_value]
    return [*elided, *(["VALUE"] if ends_early else [])]


def _value(parameter: click.Parameter, context: click.Context, given: Any) -> Any:
    texts = given if isinstance(given, list | tuple) else [given]
    if given is None or parameter.value_is_missing(given) or any(PLACEHOLDER.fullmatch(str(text)) for text in texts):
        default = parameter.get_default(context)
        return None if parameter.value_is_missing(default) else default
    if isinstance(parameter.type, click.Path | click.File):
        return given
    value = parameter.type_cast_value(context, given)
    return parameter.callback(context, parameter, value) if parameter.callback and value is not None else value


def check_policies(values: Mapping[str, Any]) -> None:
    """Checks each `--set KIND.NAME=VALUE` against the policies, or the service, that it is for.

    Raises SettingTextError, UnknownPolicyError or RefusedError.
    """
    for text in (*(values.get("set") or ()), *(values.get("settings") or ())):
        kind, name, value = parts_of(text)
        if kind in TABLES:
            known = {p.name: p for p in TABLES[kind].params}
            if name not in known:
                raise RefusedError(f"{kind} has no setting {name}")
            known[name].type.convert(value, known[name], None)
        elif kind not in UNCHECKED_KINDS:
            for chosen in _chosen(kind, values):
                for one in value.split(",") if "settings" in values else [value]:  # `simulate` compares several
                    _make(kind, chosen, {name: one})


def _chosen(kind: str, values: Mapping[str, Any]) -> Sequence[str]:
    """Names of the policies of a kind that a command line chooses: several where it compares them."""
    option = {"routing": "policy"}.get(kind, kind)
    of_services = [parts_of(text) for text in values.get("set") or ()]  # `up --set scheduler.order=edf`
    if chosen := [value for service, name, value in of_services if service in SERVICES and name == option]:
        return chosen
    given = next((values[name] for name in (option, f"{option}s", f"{option}_policies") if values.get(name)), None)
    names = given if isinstance(given, list | tuple) else str(given or DEFAULTS.get(kind, "")).split(",")
    return [name for name in names if name in POLICIES.get(kind, names)] or [DEFAULTS.get(kind, "")]


def _make(kind: str, policy: str, settings: Settings) -> None:
    """Makes the policy with these settings. Raises UnknownPolicyError."""
    kinds = [k for k, policies in POLICIES.items() if kind in policies]
    if kinds:  # a policy's own name
        kind, policy = kinds[0], kind
    match kind:
        case "routing":
            policy_set(routing=policy, settings=settings)
        case "admission":
            policy_set(admission=policy, settings={f"admission.{name}": value for name, value in settings.items()})
        case "order":
            policy_set(ordering=policy, settings={f"order.{name}": value for name, value in settings.items()})
        case "pair" | "outlier":
            policy_set(settings={f"{kind}.{name}": value for name, value in settings.items()})
        case "rebalance":
            rebalancing_policy(policy, settings)
        case "scaling":
            scaling_policy(policy, settings)
        case "tenants":
            with_changes(TenantPolicies(), [f"{name}={value}" for name, value in settings.items()])
        case _:
            raise RefusedError(f"there is no kind or policy {kind}")


def test_what_is_executable_in_the_documentation_is_found() -> None:
    """The tests of each page pass where nothing is found."""
    pages = {page: page.read_text() for page in PAGES if page.name != HISTORY}
    whole = [words for text in pages.values() for words, is_whole in our_commands(text) if is_whole]
    languages = Counter(block.language for text in pages.values() for block in blocks(text))

    assert ["pointsman", "fleet", "--watch"] in whole
    assert len(whole) > 100
    assert languages["toml"] > 5
    assert languages["yaml"] > 5
    assert not languages.keys() & {"shell", "zsh"}, "write sh: these are not parsed as commands"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_commands_parse(page: Path) -> None:
    refused = {}
    for words, whole in our_commands(page.read_text()) if page.name != HISTORY else ():
        try:
            check(words, whole=whole)
        except WRONG as error:
            refused[" ".join(words)] = str(error)

    assert not refused


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_help_texts_parse(name: str) -> None:
    refused = {}
    for command in _leaves(COMMANDS[name]):
        for words in examples(command.help or ""):
            try:
                check(words, whole=True)
            except WRONG as error:
                refused[" ".join(words)] = str(error)

    assert not refused


def check(words: Sequence[str], *, whole: bool) -> None:
    """Raises RefusedError or UnknownPolicyError for a command of ours, a target of make or a module that would not run."""
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        unknown = [w for w in words[1:] if "=" not in w and not w.startswith("-") and w.islower() and w not in targets]
        if unknown:
            raise RefusedError(f"no target {unknown}")
    elif words[0] == "python":
        if words[1:2] == ["-m"] and words[2].startswith("pointsman") and importlib.util.find_spec(words[2]) is None:
            raise RefusedError(f"no module {words[2]}")
    else:
        check_policies(parsed(words, whole=whole))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_configuration_loads(page: Path, tmp_path: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language == "toml" and block.text.startswith("# tenants.toml"):
            parse_tenant_policies(block.text)
        elif block.language == "toml" and block.text.startswith("[[engine]]"):
            parse_engines(block.text.encode())
        elif block.language == "toml":
            load(block.text, tmp_path / "pointsman.toml")
        elif block.language in ("yaml", "yml"):
            for words in _container_commands(yaml.safe_load(block.text)):
                check(words, whole=True)
        elif block.language == "python":
            compile_and_import(block.text)


def load(text: str, path: Path) -> None:
    """Raises what a process of each kind would raise that is started with this file, or RefusedError for a key without an owner."""
    path.write_text(text)
    content = tomllib.loads(text)
    keys = {key for key, value in content.items() if not isinstance(value, dict)}
    known = {parameter.name for command in TABLES.values() for parameter in command.params}
    unknown = (keys - known) | (content.keys() - keys - TABLES.keys())
    if unknown:
        raise RefusedError(f"no process has the settings or tables {sorted(unknown)}")
    for table, command in TABLES.items():
        check_policies(command.make_context(table, ["--config", str(path)]).params)


def _container_commands(node: Any) -> list[list[str]]:
    if isinstance(node, list):
        return [found for item in node for found in _container_commands(item)]
    if not isinstance(node, dict):
        return []
    own = [[str(word) for word in node["command"]]] if isinstance(node.get("command"), list) else []
    return own + [found for item in node.values() for found in _container_commands(item)]


def compile_and_import(text: str) -> None:
    """Raises SyntaxError, or RefusedError for an import of ours that does not exist."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pointsman"):
            module = importlib.import_module(node.module or "")
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            if missing:
                raise RefusedError(f"{node.module} has no {missing}")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_options_and_variables_exist(page: Path) -> None:
    options, variables = known_names()
    text = page.read_text()
    named = {match[0] for span in spans(text) if (match := re.match(r"--[a-z][a-z-]+", span))}

    unknown = named - options - FOREIGN_OPTIONS
    unset = set(re.findall(r"\bPOINTSMAN_[A-Z_]*[A-Z]\b", text)) - variables

    assert (unknown, unset) == (set(), set())


@pytest.mark.parametrize("folder", ["services", "shared/pointsman", "shared/pointsman_cli"])
def test_options_that_messages_name_exist(folder: str) -> None:
    options, _ = known_names()

    unknown = {
        f"{module.relative_to(ROOT)}: {option}"
        for module in ROOT.glob(f"{folder}/**/*.py")
        for option in options_in_texts(module.read_text()) - options - FOREIGN_OPTIONS - OPTIONS_OF_INSTALLERS
    }

    assert unknown == set()


def options_in_texts(source: str) -> set[str]:
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {option for text in texts if isinstance(text, str) for option in OPTION.findall(text)}


@functools.cache
def known_names() -> tuple[set[str], set[str]]:
    """Every option of every command of ours; every variable that one reads, or that a file of ours names."""
    leaves = [leaf for command in COMMANDS.values() for leaf in _leaves(command)]
    options = {name for c in leaves for p in c.params for name in (*p.opts, *p.secondary_opts)}
    variables = {str(p.envvar) for c in leaves for p in c.params if p.envvar}
    variables |= {f"{p.envvar}_FILE" for c in leaves for p in c.params if isinstance(p, SecretOption)}
    for source in [*ROOT.glob("shared/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "docker-compose.yml"]:
        text = source.read_text()
        variables |= set(re.findall(r"\bPOINTSMAN_[A-Z_]*[A-Z]\b", text))
        options |= set(re.findall(r'(?:add_argument|click\.option)\(\s*"(--[a-z-]+)"', text))
    variables |= {f"POINTSMAN_VLLM_{field.name.upper()}" for field in dataclasses.fields(FairnessSettings)}
    return options | {"--help", "--version"}, variables


def _leaves(command: click.Command) -> list[click.Command]:
    if not isinstance(command, click.Group):
        return [command]
    context = click.Context(command)
    found = [command.get_command(context, name) for name in command.list_commands(context)]
    return [leaf for child in found if child for leaf in _leaves(child)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_files_exist(page: Path) -> None:
    files = source_files()
    named = {word for span in spans(page.read_text()) for word in re.findall(r"^[\w/.-]+\.py\b", span)}

    missing = [name for name in named - EXAMPLES if not any(f"/{file}".endswith(f"/{name}") for file in files)]

    assert missing == []


@functools.cache
def source_files() -> set[str]:
    """Paths of our Python files, from the root."""
    return {
        str(p.relative_to(ROOT))
        for folder in ("shared", "services", "tests", "deploy")
        for p in ROOT.glob(f"{folder}/**/*.py")
    }


def test_documented_bounds_exist() -> None:
    named = {
        s for p in PAGES for s in spans(p.read_text()) if re.fullmatch(r"(?!POINTSMAN_)[A-Z_]+_(SECONDS|MAX|MIN)", s)
    }

    assert [name for name in sorted(named) if not re.search(rf"^ *{name}\b", sources(), re.MULTILINE)] == []


def test_documented_methods_exist() -> None:
    """As in `view.tracker(...)`."""
    pages = [p for p in PAGES if p.parent.name != "decisions"]
    named = {name for p in pages for s in spans(p.read_text()) for name in re.findall(r"\.([a-z_]+)\(", s)}

    assert "apply" in named
    assert [name for name in sorted(named) if not re.search(rf"\bdef {name}\(", sources())] == []


@functools.cache
def sources() -> str:
    return "\n".join(p.read_text() for folder in ("shared", "services") for p in ROOT.glob(f"{folder}/**/*.py"))


@pytest.mark.parametrize(
    "line",
    [
        "pointsman bench-gateway",
        "pointsman up --no-such-option",
        "pointsman up --engines many",
        "pointsman drain",
        "pointsman-scheduler --policy pointsman --set routing.ttft_slo_threshold=0.8",
        "pointsman-scheduler --set order.no_such_setting=1",
        "pointsman-scheduler --set no_such_kind.late_share=1",
        "pointsman-rebalancer --set rebalance.waste_weight=much",
        "pointsman up --set ingress.no_such_setting=1",
        "pointsman up --set scheduler.order=edf --set order.late_share=0.1",
        "pointsman-scheduler --policy no_such_policy",
        "make no-such-target",
        "python -m pointsman_lab.no_such_module",
    ],
)
def test_what_would_not_run_is_found(line: str) -> None:
    ((words, whole),) = our_commands(f"```sh\n{line}\n```\n")

    with pytest.raises(WRONG):
        check(words, whole=whole)


@pytest.mark.parametrize(
    "text",
    [
        "no_such_key = 1",
        "[no-such-table]\nport = 1",
        "[scheduler]\nno_such_key = 1",
        '[scheduler]\nset = ["routing.ttft_slo_threshold=0.8"]',
        '[worker]\nport = "x"',
    ],
)
def test_configuration_that_would_not_load_is_found(text: str, tmp_path: Path) -> None:
    with pytest.raises((*WRONG, click.UsageError)):
        load(text, tmp_path / "pointsman.toml")
