"""Settings: a frozen dataclass, read from flags, environment and a TOML file, in that order. A field `hold_max` is the
flag `--hold-max`, the variable `POINTSMAN_HOLD_MAX`, and in the file of `--config` the key `hold_max`, at the top or in
the service's table (`[scheduler]`), which wins. A secret may also stand in a file that `POINTSMAN_NAME_FILE` names."""

import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NewType, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import click
from typing_extensions import override

from pointsman.bounds import BOUNDS, COUNT, NOT_NEGATIVE, PORT, POSITIVE, Bounds, bounds_of
from pointsman.contracts.block_keys import SECRET_BYTES_MAX
from pointsman.contracts.permissions import JETSTREAM_API
from pointsman.contracts.subjects import LOCAL_ACTOR, valid_name
from pointsman.primitives import BLOCK_TOKENS_MAX
from pointsman.runtime.number_types import Finite, Whole
from pointsman.runtime.settings_file import read_settings_file

ENVIRONMENT_PREFIX = "POINTSMAN_"
CONFIG = "config"
OVERRIDING = f"{__name__}.overriding"
"""In the command's context: variables that win over the process's own table of the settings file."""
PUBLIC_SECRET = "pointsman-development"
"""The default; see `runtime.public_secret`."""
FILE_SUFFIX = "_FILE"
NATS_SCHEMES = ("nats", "tls")
NATS_URL = "nats://127.0.0.1:4222"


class SettingsType(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


S = TypeVar("S", bound=SettingsType)


class PoolNameType(click.ParamType[str]):
    name = "name"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not valid_name(str(value)):
            self.fail(f"'{value}' is no name: use lower-case letters, digits and dashes, at most 63", param, ctx)
        return str(value)


class SubjectType(click.ParamType[str]):
    name = "subject"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value and not re.fullmatch(r"[^\s.*>]+(\.[^\s.*>]+)*", str(value)):
            self.fail(f"'{value}' is no NATS subject without wildcards", param, ctx)
        return str(value)


class TextType(click.ParamType[str]):
    """Not empty: an empty path is the current directory."""

    name = "text"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value).strip():
            self.fail("must not be empty", param, ctx)
        return str(value)


class FlagType(click.types.BoolParamType):
    """Not blank, which click takes for false: a line of an environment file that was not filled in switches nothing off."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        if not str(value).strip():
            self.fail("must be true or false, not blank", param, ctx)
        return super().convert(value, param, ctx)


class SecretType(TextType):
    """As `block_keys.KeyChain` takes it, and the same whether it came by a flag, a variable or a file."""

    name = "secret"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        secret = super().convert(value, param, ctx).strip()
        try:
            size = len(secret.encode())
        except UnicodeEncodeError:
            self.fail("is not UTF-8", param, ctx)
        if size > SECRET_BYTES_MAX:
            self.fail(f"has {size} bytes, and may have {SECRET_BYTES_MAX}, as of openssl rand -hex 32", param, ctx)
        return secret


class NatsType(click.ParamType[str]):
    """URLs of nats-servers, comma-separated, or a list of them in the settings file."""

    name = "url"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        scheme = "" if "://" in text else "nats://"
        servers = [scheme + server.strip() for server in text.split(",")]
        if not all(map(_is_nats_url, servers)):
            shown = nats_shown(text)
            self.fail(f"'{shown}' is no URL such as nats://host:4222; a password has no comma, /, # or ?", param, ctx)
        return ",".join(servers)


def _is_nats_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError
    except ValueError:
        return False
    return parts.scheme in NATS_SCHEMES and bool(parts.hostname)


def nats_shown(servers: str) -> str:
    """Without what proves who asks, also where that is written wrongly: all up to the last @ of a server."""
    return ",".join(
        re.sub(r"^(\w+://)?.*@", r"\1", server, flags=re.DOTALL) for server in re.split(r",(?=\w+://)", servers)
    )


class ConfigType(click.Path):
    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("is empty; name a TOML file, or a directory of them", param, ctx)
        return super().convert(value, param, ctx)


NUMBERS: dict[Any, Callable[[Bounds], click.ParamType[Any]]] = {int: Whole, float: Finite}
TEXT = TextType()
FLAG = FlagType()
SECRET = SecretType()
NATS = NatsType()


def setting(
    default: Any,
    help: str,  # noqa: A002 - click's word
    *,
    choices: tuple[str, ...] | None = None,
    bounds: Bounds = NOT_NEGATIVE,
    form: click.ParamType[str] | None = None,
    secret: bool = False,
) -> Any:
    """`bounds`: of a number. `form`: of a text. `secret`: hidden in `--help` and logs, and may stand in a file."""
    metadata = {"help": help, "choices": choices, BOUNDS: bounds, "form": form, "secret": secret}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class DeploymentSettings:
    nats: str = setting(
        NATS_URL,
        "URL of the nats-server that carries the log and the commands; may contain USER:PASSWORD@ or TOKEN@. Default: "
        f"{NATS_URL}.",
        secret=True,
        form=NATS,
    )
    nats_credentials: str = setting("", "File with this process's NATS user: an nkey seed, or a .creds file.")
    nats_ca: str = setting("", "File with the certificates that sign the nats-server's; makes TLS mandatory.")
    nats_certificate: str = setting("", "File with this process's certificate for the nats-server.")
    nats_key: str = setting("", "File with the certificate's private key.")
    nats_domain: str = setting(
        "",
        "JetStream domain of the servers that hold the log, if this process connects to a leaf node with another.",
        form=SubjectType(),
    )
    nats_api_prefix: str = setting(
        "",
        "First tokens of JetStream's API, where another account imports it; instead of --nats-domain.",
        form=SubjectType(),
    )
    pool: str = setting(
        "default",
        "Name of the pool: the engines that serve one model and may replace each other.",
        form=PoolNameType(),
    )
    speed: float = setting(
        1.0,
        "How much faster than real time the (simulated) engines run. SLOs and reported latencies are engine time.",
        bounds=POSITIVE,
    )
    log_bytes_max: int = setting(
        4 * 1024**3, "Bytes that the pool's log keeps, the oldest go first. An existing log only grows.", bounds=COUNT
    )
    log_age_seconds_max: float = setting(
        7 * 24 * 3600.0, "Wall seconds that the pool's log keeps an event. An existing log only grows.", bounds=POSITIVE
    )
    log_replicas: int = setting(
        1, "Servers that hold the log; 3 survive the loss of one. Counts when the log is made.", bounds=COUNT
    )

    @property
    def actor(self) -> str:
        """Name under which NATS lets this process send admin commands: that of its credentials file."""
        return Path(self.nats_credentials).stem or LOCAL_ACTOR

    @property
    def nats_api(self) -> str:
        """First tokens of JetStream's API."""
        if self.nats_api_prefix:
            return self.nats_api_prefix + "."
        return f"$JS.{self.nats_domain}.API." if self.nats_domain else JETSTREAM_API

    @property
    def nats_shown(self) -> str:
        return nats_shown(self.nats)


@dataclass(frozen=True, kw_only=True)
class SecretSettings:
    secret: str = setting(
        PUBLIC_SECRET,
        "Secret of the deployment, mixed into every block key; at most 64 bytes.",
        form=SECRET,
        secret=True,
    )


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    block_tokens: int = setting(
        64,
        "Tokens that one block key stands for; a multiple of the engines' block size.",
        bounds=Bounds(1, BLOCK_TOKENS_MAX),
    )


@dataclass(frozen=True, kw_only=True)
class FleetSettings(DeploymentSettings, SecretSettings, BlockSettings):
    """Of a process that needs all of them."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    log_level: str = setting("info", "Least severe log line to print.", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "Format of log lines: text or json.", choices=("text", "json"))


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(LogSettings):
    host: str = setting("127.0.0.1", "Address to listen on.", form=TEXT)
    port: int = setting(0, "Port to listen on; 0 takes a free one.", bounds=PORT)

    def check(self) -> None:
        """Raises click.UsageError for settings that contradict each other or name what there is not."""


def command(settings_type: type[S], *, name: str, table: str) -> Callable[[Callable[[S], None]], click.Command]:
    """Makes a click command of a function of the settings; its docstring is the help. `table`: in the TOML file."""

    def decorate(function: Callable[[S], None]) -> click.Command:
        def callback(**values: Any) -> None:
            values.pop(CONFIG)
            settings = settings_type(**values)
            if isinstance(settings, ProcessSettings):
                settings.check()
            function(settings)

        return click.Command(
            name,
            callback=callback,
            params=[config_option(table), *options(settings_type)],
            help=function.__doc__,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
        )

    return decorate


def options(settings_type: type[SettingsType]) -> list[click.Option]:
    hints = get_type_hints(settings_type)
    own = set(settings_type.__annotations__)
    ordered = sorted(fields(settings_type), key=lambda f: f.name not in own)
    return [_option(f, hints[f.name]) for f in ordered if "help" in f.metadata]


def environment(settings: Mapping[str, object]) -> dict[str, str]:
    return {
        ENVIRONMENT_PREFIX + name.upper(): " ".join(value) if isinstance(value, tuple) else str(value)
        for name, value in settings.items()
        if value is not None
    }


def _option(f: Field[Any], hint: Any) -> click.Option:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        hint = next(a for a in get_args(hint) if a is not type(None))
        origin = get_origin(hint)
    multiple = origin is tuple
    if multiple:
        hint = get_args(hint)[0]
    if isinstance(hint, NewType):  # over Annotated
        hint = get_args(hint.__supertype__)[0]
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    flag = "--" + f.name.replace("_", "-")
    return (SecretOption if f.metadata["secret"] else click.Option)(
        [f"{flag}/--no-{flag[2:]}" if hint is bool else flag, f.name],
        type=_kind(f, hint),
        default=default,
        multiple=multiple,
        help=f.metadata["help"],
        envvar=ENVIRONMENT_PREFIX + f.name.upper(),
        show_envvar=True,
        show_default=not f.metadata["secret"],
    )


def _kind(f: Field[Any], hint: Any) -> Any:
    if f.metadata["choices"]:
        return click.Choice(f.metadata["choices"])
    if hint in NUMBERS:
        return NUMBERS[hint](bounds_of(f.metadata))
    return FLAG if hint is bool else f.metadata["form"] or hint


class SecretOption(click.Option):
    @override
    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        assert isinstance(self.envvar, str), "as `_option` made it"
        file = os.environ.get(self.envvar + FILE_SUFFIX)
        if value is not None or not file:
            return value
        named = f"{file}, which {self.envvar}{FILE_SUFFIX} names"
        try:
            value = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            message = f"cannot read {named}: {error}"
            raise click.BadParameter(message, ctx, self) from error
        if not value:
            message = f"{named}, is empty"
            raise click.BadParameter(message, ctx, self)
        return value


def config_option(table: str) -> click.Option:
    return click.Option(
        [f"--{CONFIG}"],
        type=ConfigType(path_type=Path),
        envvar=ENVIRONMENT_PREFIX + CONFIG.upper(),
        show_envvar=True,
        is_eager=True,
        help=f"TOML file with settings: keys at the top, or in the table [{table}]. Of a directory: all *.toml, the last wins.",
        callback=lambda context, _option, path: _load(context, path, table),
    )


def _load(context: click.Context, path: Path | None, table: str) -> Path | None:
    if path is None:
        return None
    known = {
        str(parameter.name): parameter
        for parameter in context.command.params
        if isinstance(parameter, click.Option) and parameter.name != CONFIG
    }
    file = read_settings_file(path, table, known)
    context.default_map = {key: _value_of_file(context, path, known[key], value) for key, value in file.merged.items()}
    context.meta[OVERRIDING] = [
        str(known[key].envvar) for key in file.table if known[key].resolve_envvar_value(context) is not None
    ]
    return path


def _value_of_file(context: click.Context, path: Path, option: click.Option, value: Any) -> Any:
    """As click takes it, which would read a list as a text. Raises click.BadParameter, which names the file, not a variable."""
    if option.multiple:
        is_kind, kind = _are_texts(value), "a list of texts in quotes"
    elif option.is_flag:
        is_kind, kind = isinstance(value, bool | str), "true or false"
    elif isinstance(option.type, click.IntRange | click.FloatRange):
        is_kind, kind = isinstance(value, int | float | str), "a number"
    elif option.type is NATS:
        is_kind, kind = _are_texts(value), "a text in quotes, or a list of them"
    else:  # a whole number is a text too: instances = 4
        is_kind, kind = isinstance(value, str) or type(value) is int, "a text in quotes"
    if not is_kind:
        raise click.BadParameter(f"{path}: {option.name} must be {kind}")
    if option.multiple and isinstance(value, str):
        value = [value]
    elif kind == "a text in quotes":
        value = str(value)
    try:
        option.type_cast_value(context, value)
    except click.BadParameter as error:
        raise click.BadParameter(f"{path}: {option.name}: {error.message}") from error
    return value


def _are_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))
