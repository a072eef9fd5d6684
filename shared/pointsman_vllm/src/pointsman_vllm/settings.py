"""Settings as environment variables, since vLLM passes nothing else to a plug-in. Read at start; an invalid value stops
the engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
EVICTIONS = ("lru", "rlt")
PREFIX = "POINTSMAN_VLLM_"


class WrongSettingError(ValueError):
    pass


@dataclass(frozen=True)
class EvictionSettings:
    """`eviction`: `lru` leaves vLLM untouched. `seed`: makes evictions deterministic."""

    eviction: str = "lru"
    seed: int = 0


@dataclass(frozen=True)
class FairnessSettings:
    """`quantum_tokens`: larger favours locality, smaller fairness. Costs: `input_weight` per uncached input token,
    `output_weight` per output token. A second of waiting equals `ageing_tokens` cached tokens."""

    quantum_tokens: float = 1_024.0
    input_weight: float = 1.0
    output_weight: float = 2.0
    ageing_tokens: float = 50.0


def eviction_settings(environment: Mapping[str, str]) -> EvictionSettings:
    """`POINTSMAN_VLLM_EVICTION` and `_SEED`. Raises WrongSettingError."""
    return EvictionSettings(
        eviction=_read(environment, "EVICTION", _one_of_evictions, EvictionSettings.eviction, "lru or rlt"),
        seed=_read(environment, "SEED", int, EvictionSettings.seed, "a whole number"),
    )


def fairness_settings(environment: Mapping[str, str]) -> FairnessSettings:
    """`POINTSMAN_VLLM_QUANTUM_TOKENS`, `_INPUT_WEIGHT` and so on. Raises WrongSettingError."""
    default = FairnessSettings
    return FairnessSettings(
        quantum_tokens=_read(environment, "QUANTUM_TOKENS", _above_zero, default.quantum_tokens, "a number above 0"),
        input_weight=_read(environment, "INPUT_WEIGHT", _not_negative, default.input_weight, "0 or more"),
        output_weight=_read(environment, "OUTPUT_WEIGHT", _not_negative, default.output_weight, "0 or more"),
        ageing_tokens=_read(environment, "AGEING_TOKENS", _not_negative, default.ageing_tokens, "0 or more"),
    )


def _read(environment: Mapping[str, str], name: str, convert: Callable[[str], T], default: T, wanted: str) -> T:
    text = environment.get(PREFIX + name, "").strip()
    if not text:
        return default
    try:
        return convert(text)
    except ValueError as error:
        raise WrongSettingError(f"{PREFIX}{name} must be {wanted}, not {text!r}") from error


def _one_of_evictions(text: str) -> str:
    if text.lower() not in EVICTIONS:
        raise ValueError(text)
    return text.lower()


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number
