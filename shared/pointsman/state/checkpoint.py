"""Encodes a State as bytes and decodes it: the content of a checkpoint. The object graph is written attribute by
attribute; shared objects stay shared. Decoding creates only classes of `pointsman.state` and `pointsman.contracts`,
runs none of their code, and refuses changed attributes. The caller checks the fold version (`CheckpointLabel.form`).
The indexes come last, so that who does not need them reads the beginning only."""

from collections import Counter, OrderedDict, deque
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from importlib import import_module
from typing import Any, cast

import msgspec

from pointsman.primitives import InstanceId
from pointsman.state.no_index import NoIndex
from pointsman.state.prefix_index import PackedIndex, PrefixIndex
from pointsman.state.state import State

PACKAGES = ("pointsman.state.", "pointsman.contracts.")
SCALARS = frozenset({int, float, str, bool, bytes, type(None)})
MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}

NO_INDEXES = b"\x90"  # an empty array, as msgpack writes it

Slot = Any
"""A scalar, or a list with the number of a node."""


class UnreadableStateError(ValueError): ...


class _Node(msgspec.Struct, array_like=True, omit_defaults=True):
    """`name`: its class. `slots`: its parts, in order."""

    kind: str
    name: str = ""
    slots: list[Slot] = []
    names: list[str] = []


class _Graph(msgspec.Struct):
    nodes: list[_Node]
    indexes: list[PackedIndex]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Graph)


def encode_state(state: State) -> bytes:
    return b"".join(encode_parts(state))


def encode_parts(state: State) -> tuple[bytes, bytes]:
    """The head, which `decode_head` reads, and the indexes. Blocks about half a second for a million blocks."""
    graph = _Writer(canonical=False).graph(state)
    indexes = _encoder.encode(graph.indexes)
    graph.indexes = []
    return _encoder.encode(graph).removesuffix(NO_INDEXES), indexes


def decode_state(content: bytes) -> State:
    """Raises UnreadableStateError."""
    try:
        return _Reader(_decoder.decode(content)).state()
    except UnreadableStateError:
        raise
    except Exception as error:
        unreadable = f"{type(error).__name__}: {error}"
        raise UnreadableStateError(unreadable) from error


def decode_head(head: bytes) -> State:
    """The state without its index (`StateParts.drop_index`). Raises UnreadableStateError."""
    state = decode_state(head + NO_INDEXES)
    state.drop_index()
    return state


def state_digest(state: State) -> str:
    content = _encoder.encode(_Writer(canonical=True).graph(state))
    return blake2b(content, digest_size=16).hexdigest()


class _Writer:
    def __init__(self, *, canonical: bool) -> None:
        self._canonical = canonical
        self._nodes: list[_Node] = []
        self._indexes: list[PackedIndex] = []
        self._known: dict[int, int] = {}
        self._alive: list[object] = []
        """Keeps numbered objects alive, so that ids stay unique."""

    def graph(self, state: State) -> _Graph:
        self._slot(state)
        return _Graph(self._nodes, self._indexes)

    def _slot(self, value: Any) -> Slot:
        if type(value) in SCALARS:
            return value
        known = self._known.get(id(value))
        return [self._add(value) if known is None else known]

    def _add(self, value: Any) -> int:
        if isinstance(value, tuple):  # its parts first
            slots = [self._slot(part) for part in value]
            return self._number(value, _Node("tuple", slots=slots))
        node = _Node("")
        number = self._number(value, node)
        self._describe(value, node)
        return number

    def _number(self, value: Any, node: _Node) -> int:
        self._nodes.append(node)
        self._alive.append(value)
        self._known[id(value)] = len(self._nodes) - 1
        return len(self._nodes) - 1

    def _describe(self, value: Any, node: _Node) -> None:
        match value:
            case Enum():
                node.kind, node.name, node.slots = "enum", _name_of(type(value)), [value.value]
            case msgspec.Struct():
                parts = list(msgspec.structs.astuple(value))
                flat = SCALARS.issuperset(map(type, parts))
                node.kind, node.name = "struct" if flat else "message", _name_of(type(value))
                node.slots = parts if flat else [_encoder.encode(value)]
            case PrefixIndex() if not isinstance(value, NoIndex):
                node.kind, node.names = "index", list(value.instances)
                node.slots = [len(self._indexes), *(value.blocks(instance) for instance in value.instances)]
                self._indexes.append(value.pack(canonical=self._canonical))
            case dict():
                node.kind, node.name = "mapping", _mapping_name(value)
                node.slots = [*self._slots(list(value)), *self._slots(list(value.values()))]
            case set():
                node.kind, node.slots = "set", self._slots(sorted(value))
            case list() | deque():
                node.kind, node.slots = type(value).__name__, self._slots(list(value))
            case _:
                attributes = _attributes(value)
                node.kind, node.name, node.names = "object", _name_of(type(value)), list(attributes)
                node.slots = self._slots(list(attributes.values()))

    def _slots(self, values: list[Any]) -> list[Slot]:
        if SCALARS.issuperset(map(type, values)):
            return values
        return [self._slot(value) for value in values]


class _Reader:
    """Creates all objects empty, then fills them, since they may refer to each other."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self._objects: list[Any] = []

    def state(self) -> State:
        nodes = self._graph.nodes
        for node in nodes:
            self._objects.append(self._shell(node))
        for number, node in enumerate(nodes):  # a tuple's parts come before it, but may be shells made after it
            if node.kind == "tuple":
                self._objects[number] = tuple(self._values(node.slots))
        for number, node in enumerate(nodes):
            self._fill(self._objects[number], node)
        state = self._objects[0]
        if not isinstance(state, State):
            unreadable = f"this is no State but a {type(state).__name__}"
            raise UnreadableStateError(unreadable)
        return state

    def _shell(self, node: _Node) -> Any:
        match node.kind:
            case "object":
                return object.__new__(_class_named(node.name))
            case "enum":
                return _class_named(node.name)(*node.slots)
            case "struct":
                return _class_named(node.name)(**_named(_class_named(node.name), node.slots))
            case "message":
                return msgspec.msgpack.decode(node.slots[0], type=_class_named(node.name))
            case "mapping":
                return MAPPINGS[node.name]()
            case "index":
                if not self._graph.indexes:
                    return NoIndex(dict(zip(map(InstanceId, node.names), node.slots[1:], strict=True)))
                return PrefixIndex.unpack(self._graph.indexes[node.slots[0]])
            case "list" | "set" | "deque":
                return {"list": list, "set": set, "deque": deque}[node.kind]()
            case "tuple":
                return ()
            case _:
                unreadable = f"there is no kind {node.kind!r}"
                raise UnreadableStateError(unreadable)

    def _fill(self, made: Any, node: _Node) -> None:
        match node.kind:
            case "list" | "deque":
                made.extend(self._values(node.slots))
            case "set":
                made.update(self._values(node.slots))
            case "mapping":
                values = self._values(node.slots)
                half = len(values) // 2
                fill = dict.update if isinstance(made, Counter) else type(made).update  # a Counter's own would add up
                fill(made, zip(values[:half], values[half:], strict=True))
            case "object":
                _check_attributes(type(made), node.names)
                for name, value in zip(node.names, self._values(node.slots), strict=True):
                    object.__setattr__(made, name, value)
            case _:
                pass

    def _values(self, slots: list[Slot]) -> list[Any]:
        if list not in set(map(type, slots)):
            return slots
        objects = self._objects
        return [objects[slot[0]] if type(slot) is list else slot for slot in slots]


def _attributes(value: object) -> dict[str, Any]:
    found = {name: getattr(value, name) for name in _declared_slots(type(value)) if hasattr(value, name)}
    found.update(getattr(value, "__dict__", {}))
    return found


def _declared_slots(of: type) -> list[str]:
    return [name for base in reversed(of.__mro__) for name in base.__dict__.get("__slots__", ())]


def _check_attributes(of: type, names: list[str]) -> None:
    declared = {field.name for field in fields(of)} if is_dataclass(of) else set(names)
    if declared != set(names):
        unreadable = (
            f"{of.__name__} has other attributes now: {', '.join(sorted(declared.symmetric_difference(names)))}"
        )
        raise UnreadableStateError(unreadable)


def _named(struct: type[Any], values: list[Any]) -> dict[str, Any]:
    return dict(zip((field.name for field in msgspec.structs.fields(struct)), values, strict=True))


def _mapping_name(value: dict[Any, Any]) -> str:
    name = type(value).__name__
    assert MAPPINGS.get(name) is type(value), f"a {name} cannot be kept"
    return name


def _name_of(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    assert name.startswith(PACKAGES), f"a {name} cannot be kept"
    return name


def _class_named(name: str) -> type[Any]:
    module, _, qualified = name.partition(":")
    found = getattr(import_module(module), qualified, None) if module.startswith(PACKAGES) else None
    if not isinstance(found, type):
        unreadable = f"there is no class {name}"
        raise UnreadableStateError(unreadable)
    return cast("type[Any]", found)
