"""Encodes a State as bytes and decodes it: the content of a checkpoint. The object graph is written attribute by
attribute; shared objects stay shared. Decoding creates only classes of `pointsman.state` and `pointsman.contracts`, and
runs none of their code. The caller checks the fold version (`CheckpointLabel.form`).

A checkpoint of an earlier release with the same fold version may lack attributes. A field with a default gets it, others
what `checkpoint_additions` says; where neither does, the checkpoint is refused. Attributes that are gone are dropped.

The indexes come last, so that who does not need them reads the beginning only."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from importlib import import_module
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from pointsman.primitives import InstanceId
from pointsman.state.checkpoint_additions import ADDITIONS
from pointsman.state.derived import Derived
from pointsman.state.no_index import NoIndex
from pointsman.state.packed_index import PackedIndex
from pointsman.state.prefix_index import PrefixIndex
from pointsman.state.state import PoolSettings, State

PACKAGES = ("pointsman.state.", "pointsman.contracts.")
SCALARS = frozenset({int, float, str, bool, bytes, type(None)})
MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}

NO_INDEXES = b"\x90"  # an empty array, as msgpack writes it

NODES_MAX = 2**20
NODE_BYTES_MIN = 16
"""Mean size of a node in the content; a hundred bytes are usual, 23 of conversations with short names. An object made of a node
takes up to a kilobyte."""

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
    """`fields`: of the structs, by class. `indexes` come last."""

    nodes: Annotated[list[_Node], Meta(max_length=NODES_MAX)]
    fields: dict[str, list[str]] = {}
    indexes: list[PackedIndex] = []


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
        graph = _decoder.decode(content)
        _check_form(graph, len(content))
        return _Reader(graph).state()
    except UnreadableStateError:
        raise
    except Exception as error:
        raise UnreadableStateError(f"{type(error).__name__}: {error}") from error


def decode_head(head: bytes) -> State:
    """The state without its index (`StateParts.drop_index`). Raises UnreadableStateError."""
    state = decode_state(head + NO_INDEXES)
    state.drop_index()
    return state


def state_digest(state: State) -> str:
    content = _encoder.encode(_Writer(canonical=True).graph(state))
    return blake2b(content, digest_size=16).hexdigest()


def _check_form(graph: _Graph, size: int) -> None:
    """Before anything is made of the nodes. Raises UnreadableStateError."""
    if len(graph.nodes) > size // NODE_BYTES_MIN:
        raise UnreadableStateError(f"{len(graph.nodes)} nodes are too many for {size} bytes")
    indexes = [node.slots[0] for node in graph.nodes if node.kind == "index"]
    if len(set(indexes)) < len(indexes):
        raise UnreadableStateError("two nodes have the same index")


class _Writer:
    def __init__(self, *, canonical: bool) -> None:
        self._canonical = canonical
        self._nodes: list[_Node] = []
        self._indexes: list[PackedIndex] = []
        self._fields: dict[str, list[str]] = {}
        self._known: dict[int, int] = {}
        self._alive: list[object] = []
        """Keeps numbered objects alive, so that ids stay unique."""

    def graph(self, state: State) -> _Graph:
        self._slot(state)
        return _Graph(self._nodes, self._fields, self._indexes)

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
                if flat:
                    self._fields.setdefault(node.name, list(type(value).__struct_fields__))
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
                attributes = attributes_of(value)
                if self._canonical:
                    attributes = dict(sorted(attributes.items()))
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
        self._expected: dict[type, list[str]] = {}
        """Attributes of the classes in an empty State."""
        self._lacking: list[tuple[Any, str]] = []

    def state(self) -> State:
        nodes = self._graph.nodes
        for node in nodes:
            self._objects.append(self._shell(node))
        for number, node in enumerate(nodes):  # a tuple's parts come before it, but may be shells made after it
            if node.kind == "tuple":
                self._objects[number] = tuple(self._values(node.slots))
        state = self._objects[0]
        if not isinstance(state, State):
            raise UnreadableStateError(f"this is no State but a {type(state).__name__}")
        self._expected = _attributes_within(State(PoolSettings()))
        for number, node in enumerate(nodes):
            self._fill(self._objects[number], node)
        for made, name in self._lacking:
            object.__setattr__(made, name, ADDITIONS[f"{type(made).__name__}.{name}"](state, made))
        return state

    def _shell(self, node: _Node) -> Any:
        match node.kind:
            case "object":
                return object.__new__(_class_named(node.name))
            case "enum":
                return _class_named(node.name, Enum)(*node.slots)
            case "struct":
                return self._struct(_class_named(node.name), node)
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
                raise UnreadableStateError(f"there is no kind {node.kind!r}")

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
                expected = self._names(type(made))
                kept = zip(node.names, self._values(node.slots), strict=True)
                if expected is None or expected == node.names:
                    for name, value in kept:
                        object.__setattr__(made, name, value)
                else:
                    self._fill_changed(made, dict(kept), expected)
                for name, first in _derived(type(made)).items():
                    object.__setattr__(made, name, first())
            case _:
                pass

    def _fill_changed(self, made: Any, kept: dict[str, Any], expected: list[str]) -> None:
        defaults = _defaults(type(made))
        for name in expected:
            if name in kept:
                object.__setattr__(made, name, kept[name])
            elif name in defaults:
                object.__setattr__(made, name, defaults[name]())
            elif f"{type(made).__name__}.{name}" in ADDITIONS:
                self._lacking.append((made, name))
            else:
                raise UnreadableStateError(f"{type(made).__name__} has an attribute {name} now")

    def _names(self, of: type) -> list[str] | None:
        if of not in self._expected and is_dataclass(of):
            self._expected[of] = [field.name for field in fields(of) if field.name not in _derived(of)]
        return self._expected.get(of)

    def _struct(self, of: type[Any], node: _Node) -> Any:
        now = of.__struct_fields__
        kept = dict(zip(self._graph.fields.get(node.name, now), node.slots, strict=True))
        return of(**{name: kept[name] for name in now if name in kept})

    def _values(self, slots: list[Slot]) -> list[Any]:
        if list not in set(map(type, slots)):
            return slots
        objects = self._objects
        return [objects[slot[0]] if type(slot) is list else slot for slot in slots]


def attributes_of(value: object) -> dict[str, Any]:
    found = {name: getattr(value, name) for name in _declared_slots(type(value)) if hasattr(value, name)}
    found.update(getattr(value, "__dict__", {}))
    for name in _derived(type(value)):
        found.pop(name, None)
    return found


def _derived(of: type) -> Derived:
    derived: Derived = getattr(of, "DERIVED", {})
    return derived


def _declared_slots(of: type) -> list[str]:
    return [name for base in reversed(of.__mro__) for name in base.__dict__.get("__slots__", ())]


def _attributes_within(value: object) -> dict[type, list[str]]:
    """Of every class of State's own in this object graph, attributes that any of its objects has."""
    found: dict[type, list[str]] = {}
    seen, left = set[int](), [value]
    while left:
        here = left.pop()
        if id(here) in seen or isinstance(here, PrefixIndex | msgspec.Struct | Enum):
            continue
        seen.add(id(here))
        if isinstance(here, dict):
            left += here.values()
        elif isinstance(here, list | tuple | set | deque):
            left += here
        elif type(here).__module__.startswith(PACKAGES):
            attributes = attributes_of(here)
            found[type(here)] = list(dict.fromkeys([*found.get(type(here), ()), *attributes]))
            left += attributes.values()
    return found


def _defaults(of: type) -> dict[str, Callable[[], Any]]:
    if not is_dataclass(of):
        return {}
    made = {field.name: field.default_factory for field in fields(of) if field.default_factory is not MISSING}
    return made | {f.name: lambda f=f: f.default for f in fields(of) if f.default is not MISSING}


def _mapping_name(value: dict[Any, Any]) -> str:
    name = type(value).__name__
    assert MAPPINGS.get(name) is type(value), f"a {name} cannot be kept"
    return name


def _name_of(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    assert name.startswith(PACKAGES), f"a {name} cannot be kept"
    return name


def _class_named(name: str, base: type = object) -> type[Any]:
    """Not one that a module only imports."""
    module, _, qualified = name.partition(":")
    found = getattr(import_module(module), qualified, None) if module.startswith(PACKAGES) else None
    if not (isinstance(found, type) and found.__module__.startswith(PACKAGES) and issubclass(found, base)):
        raise UnreadableStateError(f"there is no class {name}")
    return cast("type[Any]", found)
