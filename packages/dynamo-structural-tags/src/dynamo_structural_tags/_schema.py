# SPDX-License-Identifier: Apache-2.0
"""JSON Schema as this package reads it: what a node admits, whether a value is valid, and whether a schema is one.

Schemas are read as JSON Schema Draft 2020-12, plus what tool definitions hold in practice: `nullable: true` (OpenAPI
3.0) admits null beside whatever else the node says, `definitions` beside `$defs`, and Draft 7's `items` array with
`additionalItems` and `dependencies`. References stay inside the document; nothing is ever fetched.

Where an object names its properties and says nothing of others, the grammar admits no others: narrower than JSON
Schema, and what xgrammar's own grammars do. `additionalProperties` says otherwise where it is meant.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

from ._errors import RequestError
from ._grammar import (
    ANY_ORDER_LIMIT,
    COUNT_LIMIT,
    EXACT_LENGTH,
    MAX_COUNT,
    MIN_COUNT,
    JsonGrammar,
    Rules,
    literal,
    pattern_rule,
)
from ._json import shown
from ._regex import TooCostlyError, bounded, compiled, repeats_a_group, search

__all__ = [
    "ANY_ORDER_LIMIT",
    "CHECKED",
    "ENFORCED",
    "Alternative",
    "ArrayShape",
    "Constant",
    "JsonGrammar",
    "Kinds",
    "NumberRule",
    "ObjectShape",
    "Property",
    "Rules",
    "Schema",
    "StringRule",
    "check_schema",
    "literal",
    "pattern_rule",
]

#: Keyword -> how generation enforces it. The README's table is made of these two.
ENFORCED: dict[str, str] = {
    "type": "one type or several; integers have no fraction, no leading zero and no `-0`",
    "enum": "its members, each in one spelling",
    "const": "its value, in one spelling",
    "nullable": "`true` admits null beside the rest of the node, like `null` among the types",
    "properties": "in declared order, or in any order where a request asks for it and there are at most "
    f"{ANY_ORDER_LIMIT} of them",
    "required": "each is written exactly once",
    "additionalProperties": "other keys, never equal to a declared one; that they differ from each other is checked; "
    "where properties are declared and this is absent, there are no others",
    "minProperties": f"where no properties are declared, up to {MIN_COUNT}; else checked",
    "maxProperties": "where no properties are declared, and where the required ones use it up; else checked",
    "items": "every item, or every item after `prefixItems`; also Draft 7's array of schemas",
    "prefixItems": "item by item",
    "minItems": f"up to {MIN_COUNT}; the rest is checked",
    "maxItems": f"up to {MAX_COUNT}; beyond it checked",
    "minimum": "integers and decimals; a bounded number has no exponent",
    "maximum": "as `minimum`",
    "exclusiveMinimum": "as `minimum`; beside a bound other than 0 a number has at most 15 significant digits",
    "exclusiveMaximum": "as `exclusiveMinimum`",
    "minLength": f"in characters of the string, an escape counted as one, up to {EXACT_LENGTH}; the rest is "
    "checked, and all of it beside a `pattern`",
    "maxLength": f"as `minLength`; a bound above {EXACT_LENGTH}, and one beside a `pattern`, is checked",
    "pattern": "without look-around, back references, `\\b` and inner anchors, else checked; counts above "
    f"{COUNT_LIMIT} states are checked",
    "$ref": "inside the document, recursion included",
    "$defs": "by reference",
    "definitions": "by reference",
    "anyOf": "each option together with the rest of the node",
    "oneOf": "as `anyOf`; that exactly one holds is checked",
    "allOf": "merged; a second pattern is checked",
}

#: Keyword -> what is checked once a call is complete: a call that breaks it is an `invalid_arguments`.
CHECKED: dict[str, str] = {
    "multipleOf": "the quotient",
    "uniqueItems": "no two items are equal",
    "contains": "with `minContains` and `maxContains`",
    "minContains": "with `contains`",
    "maxContains": "with `contains`",
    "format": "date, time, date-time, email, ipv4, ipv6, uuid; any other is an annotation",
    "propertyNames": "every key",
    "patternProperties": "the values of the keys that match",
    "dependentRequired": "keys that ask for others",
    "dependentSchemas": "keys that ask for a schema",
    "dependencies": "Draft 7's form of the two",
    "unevaluatedProperties": "what no other keyword looked at",
    "unevaluatedItems": "what no other keyword looked at",
    "additionalItems": "beside Draft 7's array `items`",
    "not": "the opposite of a schema",
    "if": "with `then` and `else`",
    "then": "with `if`",
    "else": "with `if`",
}

#: How deep a schema may nest, and how many nodes and enum members it may have.
MAX_DEPTH = 64
MAX_NODES = 20_000
#: The longest pattern, and the longest name of a property.
MAX_PATTERN = 16_384
MAX_KEY = 256
#: The most properties of one object: to compile optional ones takes xgrammar time that grows with their square.
MAX_PROPERTIES = 1000
#: How many nodes a node may have look at the same value through its references.
MAX_VISITS = 5_000
#: Integers of more bits are refused: they have no text in Python.
_MOST_BITS = 14_000
#: The most keywords that are checked in a value: so many, and for each value inside it so many for each of the schema.
_MOST_CHECKS, _CHECKS_EACH = 20_000, 4
#: Into how many alternatives a node's anyOf, oneOf and allOf may multiply; beyond it they are checked, not enforced.
_MOST_BRANCHES = 1024

_TYPES = ("null", "boolean", "string", "array", "object", "integer", "number")
#: "number" is "integer" and "fraction": so types intersect as sets.
_ALL = frozenset({"null", "boolean", "string", "array", "object", "integer", "fraction"})


@dataclass(frozen=True)
class Kinds:
    """Which JSON types a schema admits."""

    string: bool
    object: bool
    array: bool
    #: Numbers, true, false, null.
    scalar: bool


@dataclass(frozen=True)
class StringRule:
    """The strings that one alternative of a schema admits."""

    kind: ClassVar[Literal["string"]] = "string"
    #: Exactly these, or None.
    values: tuple[str, ...] | None = None
    #: An unanchored regular expression, or None.
    pattern: str | None = None
    #: Bounds in characters (Unicode code points).
    min_length: int = 0
    max_length: int | None = None


@dataclass(frozen=True)
class NumberRule:
    """The numbers that one alternative of a schema admits."""

    kind: ClassVar[Literal["number"]] = "number"
    integer: bool = False
    minimum: Decimal | None = None
    maximum: Decimal | None = None
    #: Whether the minimum itself is left out, and the maximum.
    above: bool = False
    below: bool = False

    def integers(self) -> tuple[int | None, int | None]:
        """Return the least and the greatest integer within the bounds; None: unbounded."""
        low = high = None
        if self.minimum is not None:
            low = math.ceil(self.minimum)
            low += self.above and low == self.minimum
        if self.maximum is not None:
            high = math.floor(self.maximum)
            high -= self.below and high == self.maximum
        return low, high

    def unbounded(self) -> NumberRule:
        """Return the rule without its bounds."""
        return NumberRule(self.integer)


@dataclass(frozen=True)
class Constant:
    """One value that is no string, from a `const` or an `enum`; also true, false and null by type."""

    kind: ClassVar[Literal["constant"]] = "constant"
    value: Any


@dataclass(frozen=True)
class ArrayShape:
    """The arrays that one alternative of a schema admits."""

    kind: ClassVar[Literal["array"]] = "array"
    #: What the first items hold.
    prefix: tuple[Schema, ...]
    #: What the others hold; None: there are no others.
    items: Schema | None
    min_items: int = 0
    max_items: int | None = None


@dataclass(frozen=True)
class Property:
    """A declared property of an object."""

    key: str
    schema: Schema
    required: bool


@dataclass(frozen=True)
class ObjectShape:
    """The objects that one alternative of a schema admits."""

    kind: ClassVar[Literal["object"]] = "object"
    #: In declared order; a required key that is not declared stands at the end.
    properties: tuple[Property, ...]
    #: What other keys hold; None: there are no others.
    additional: Schema | None
    min_properties: int = 0
    max_properties: int | None = None


Alternative: TypeAlias = "StringRule | NumberRule | Constant | ArrayShape | ObjectShape"


class _Branch(NamedTuple):
    """Nodes that all hold, without combinators: `flats` are their own keywords, `values` what enums leave."""

    types: frozenset[str] = _ALL
    flats: tuple[Mapping[str, Any], ...] = ()
    values: tuple[Any, ...] | None = None


class _Document:
    """A whole schema: where references point, and the validator."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._targets: dict[str, Any] = {}

    def target(self, reference: str) -> Any:
        """Return the node that a reference inside the document names.

        Raises:
            KeyError: when there is none.
        """
        if reference in self._targets:
            return self._targets[reference]
        if not reference.startswith("#"):
            raise KeyError(reference)
        fragment = unquote(reference[1:])
        node = self.root
        if fragment and not fragment.startswith("/"):
            node = next(found for found in _nodes(self.root) if found.get("$anchor") == fragment)
        elif fragment:
            for part in fragment[1:].split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                if isinstance(node, Mapping):
                    node = node[part]
                elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                    node = node[int(part)]
                else:
                    raise KeyError(reference)
        self._targets[reference] = node
        return node

    @cached_property
    def nodes(self) -> int:
        """How many objects the document holds."""
        return sum(1 for _ in _nodes(self.root))

    @cached_property
    def validator(self) -> Any:
        root = self.root
        if isinstance(root, Mapping):
            # They would change the dialect, or what `#` means.
            root = {key: value for key, value in root.items() if key not in ("$schema", "$id", "id")}
        return _validator_class()(root, registry=_no_registry(), format_checker=_formats())


def _nodes(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object inside a document."""
    pending = [node]
    while pending:
        found = pending.pop()
        if isinstance(found, Mapping):
            yield found
            pending.extend(found.values())
        elif isinstance(found, list):
            pending.extend(found)


#: Keywords of an object, and of a value in it, that the quick check of a plain schema knows.
_SAID = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_PLAIN_OBJECT = _SAID | {"$schema", "type", "properties", "required", "additionalProperties"}
_PLAIN_VALUE = _SAID | {"type"}
#: A JSON type -> the exact types of its values. `1.0` is an integer too, and left to the full check.
_PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


class Schema:
    """A schema's node together with the document it stands in.

    The document has to have passed :func:`check_schema`, and must not change while the schema is in use.

    Args:
        node: The node: a mapping, True or False.
        root: The document; None: the node is the document.
        path: Where the node stands in the request, for messages.
    """

    def __init__(self, node: Any, root: Any = None, path: str = "") -> None:
        self.path = path
        self._document = _Document(node if root is None else root)
        self._nodes: tuple[Any, ...] = () if node is True or node == {} else (node,)
        self._found: tuple[Alternative, ...] | None = None
        self.key = self._key()

    def _inner(self, nodes: Sequence[Any], path: str) -> Schema:
        """Return the schema of nodes of the same document that all hold."""
        made = Schema.__new__(Schema)
        made.path = path
        made._document = self._document
        made._nodes = tuple({id(node): node for node in nodes if node is not True and node != {}}.values())
        made._found = None
        made.key = made._key()
        return made

    def _key(self) -> tuple[int, tuple[int, ...]]:
        """Return what two schemas of the same nodes of one document share; the second part is empty for `true`."""
        nodes = self._nodes
        return id(self._document), (id(nodes[0]),) if len(nodes) == 1 else tuple(sorted(map(id, nodes)))

    def only(self, kind: Literal["object", "array", "string"]) -> Schema:
        """Return the schema narrowed to one type."""
        return self._inner([*self._nodes, _ONLY[kind]], self.path)

    @cached_property
    def kinds(self) -> Kinds:
        """Which JSON types the schema admits."""
        found = set()
        for one in self.alternatives():
            if one.kind == "constant":
                value = one.value
                found.add("object" if isinstance(value, Mapping) else "array" if isinstance(value, list) else "scalar")
            else:
                found.add("scalar" if one.kind == "number" else one.kind)
        return Kinds("string" in found, "object" in found, "array" in found, "scalar" in found)

    def strings(self) -> tuple[StringRule, ...]:
        """Return the alternatives that are strings."""
        return tuple(one for one in self.alternatives() if one.kind == "string")

    def objects(self) -> tuple[ObjectShape, ...]:
        """Return the alternatives that are objects, those named by a `const` or an `enum` excepted."""
        return tuple(one for one in self.alternatives() if one.kind == "object")

    def alternatives(self) -> tuple[Alternative, ...]:
        """Return what the schema admits, one alternative for each type and option; empty where it admits nothing."""
        if self._found is None:
            try:
                self._found = self._alternatives()
            except RecursionError:
                raise RequestError(self.path, "refers to its definitions in too deep a chain") from None
        return self._found

    def problem(self, value: Any) -> tuple[str, str] | None:
        """Return where in the value, as in `items[2].price`, and how it breaks the schema; None where it is valid.

        Every keyword is looked at, those that no grammar enforces included.
        """
        if self._plain is not None and self._plain(value):
            return None

        from jsonschema.exceptions import best_match

        _LEFT.checks = _MOST_CHECKS + _CHECKS_EACH * (25 + self._document.nodes) * _values(value)
        try:
            for validator in self._validators:
                error = best_match(validator.iter_errors(value))
                if error is not None:
                    message = error.message
                    return _value_path(error.absolute_path), message if len(message) <= 300 else f"{message[:297]}..."
        except RecursionError:
            return "", "is nested too deeply to be checked"
        except _TooManyChecksError:
            return "", "would take too long to be checked"
        return None

    @cached_property
    def _plain(self) -> Callable[[Any], bool] | None:
        """Return a quick check that is sure of what it accepts, for flat objects of simple types."""
        node = self._nodes[0] if len(self._nodes) == 1 else None
        if not isinstance(node, Mapping) or not _PLAIN_OBJECT.issuperset(node) or node.get("type") != "object":
            return None
        kinds: dict[str, tuple[type, ...]] = {}
        for key, inner in node.get("properties", {}).items():
            kind = inner.get("type") if isinstance(inner, Mapping) and _PLAIN_VALUE.issuperset(inner) else None
            if not isinstance(kind, str) or kind not in _PLAIN_TYPES:
                return None
            kinds[key] = _PLAIN_TYPES[kind]
        required = tuple(node.get("required", ()))
        closed = node.get("additionalProperties", True) is False
        if not isinstance(node.get("additionalProperties", True), bool):
            return None

        def holds(value: Any) -> bool:
            if type(value) is not dict:
                return False
            for key, one in value.items():
                found = kinds.get(key)
                if closed if found is None else type(one) not in found:
                    return False
            return all(key in value for key in required)

        return holds

    @cached_property
    def _validators(self) -> tuple[Any, ...]:
        validator, root = self._document.validator, self._document.root
        return tuple(validator if node is root else validator.evolve(schema=node) for node in self._nodes)

    # Alternatives -------------------------------------------------------------------------------------------------

    def _alternatives(self) -> tuple[Alternative, ...]:
        node = self._nodes[0] if len(self._nodes) == 1 else None
        if isinstance(node, Mapping) and _EXPANDED.isdisjoint(node):
            return tuple(self._typed(_Branch(_types(node), (node,))))
        branches = [_Branch()]
        for node in self._nodes:
            branches = self._expanded(node, branches, ())
        different: dict[Any, Alternative] = {}
        for branch in branches:
            for one in self._typed(branch):
                # To Python 1 is True; and an enum's members may be unhashable.
                different.setdefault(repr(one.value) if one.kind == "constant" else one, one)
        found = different.values()
        free = {one.kind for one in found if one in _FREE}
        return tuple(one for one in found if one.kind not in free or one in _FREE)

    def _expanded(self, node: Any, branches: list[_Branch], seen: tuple[int, ...]) -> list[_Branch]:
        """Return the branches narrowed by a node."""
        if node is True or not branches:
            return branches
        if node is False or id(node) in seen:
            return []  # a node that is itself again through references alone admits nothing more
        if node.get("nullable") is True:
            nulls = [one._replace(types=one.types & {"null"}) for one in branches if "null" in one.types]
            if nulls:
                return self._own(node, branches, seen) + nulls
        return self._own(node, branches, seen)

    def _own(self, node: Mapping[str, Any], branches: list[_Branch], seen: tuple[int, ...]) -> list[_Branch]:
        types = _types(node)
        values = node.get("enum")
        if "const" in node:
            values = [node["const"]] if values is None else [one for one in values if _same(one, node["const"])]
        narrowed = []
        for branch in branches:
            left = branch.types & types
            kept = branch.values
            if values is not None:
                among = None if kept is None else set(map(_frozen, kept))
                kept = tuple(one for one in values if among is None or _frozen(one) in among)
            if left and kept != ():
                narrowed.append(_Branch(left, (*branch.flats, node), kept))
        seen = (*seen, id(node))
        if "$ref" in node:
            narrowed = self._expanded(self._document.target(node["$ref"]), narrowed, seen)
        for option in node.get("allOf", ()):
            narrowed = self._expanded(option, narrowed, seen)
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                options: list[_Branch] = []
                for option in node[keyword]:
                    options += self._expanded(option, narrowed, seen)
                    if len(options) > _MOST_BRANCHES:
                        narrowed = [one._replace(flats=(*one.flats, _OPEN)) for one in narrowed]
                        break
                else:
                    narrowed = options
        return narrowed

    def _typed(self, branch: _Branch) -> Iterator[Alternative]:
        flats, types = branch.flats, branch.types
        if branch.values is not None:
            kept = [one for one in branch.values if _type(one) & types]
            if any(not _PLAIN_KEYS.issuperset(flat) for flat in flats):
                passed = _COMBINING | {"enum", "const"}
                own = [{key: inner for key, inner in flat.items() if key not in passed} for flat in flats]
                check = self._inner(own, "")
                kept = [one for one in kept if check.problem(one) is None]
            strings = tuple(one for one in kept if isinstance(one, str))
            if strings:
                yield StringRule(tuple(dict.fromkeys(strings)))
            yield from (Constant(one) for one in kept if not isinstance(one, str))
            return
        if "string" in types:
            rule = _string_rule(flats)
            if rule is not None:
                yield rule
        if "integer" in types:
            number = _number_rule(flats, "fraction" not in types)
            if number is not None:
                yield number
        if "boolean" in types:
            yield Constant(True)
            yield Constant(False)
        if "null" in types:
            yield Constant(None)
        if "array" in types:
            array = self._array_shape(flats)
            if array is not None:
                yield array
        if "object" in types:
            shape = self._object_shape(flats)
            if shape is not None:
                yield shape

    def _array_shape(self, flats: Sequence[Mapping[str, Any]]) -> ArrayShape | None:
        least, most = _bounds(flats, "minItems", "maxItems")
        split = []
        for flat in flats:
            items = flat.get("items", True)
            if isinstance(items, list):
                split.append((items, flat.get("additionalItems", True)))
            else:
                split.append((flat.get("prefixItems", ()), items))
        count = max((len(prefix) for prefix, _ in split), default=0)
        prefix = []
        for index in range(count):
            nodes = [heads[index] if index < len(heads) else rest for heads, rest in split]
            if False in [node for node in nodes if isinstance(node, bool)]:
                most = index if most is None else min(most, index)
                break
            prefix.append(self._inner(nodes, f"{self.path}.prefixItems[{index}]"))
        rest_nodes = [rest for _, rest in split]
        items = None
        if any(node is False for node in rest_nodes):
            most = len(prefix) if most is None else min(most, len(prefix))
        else:
            items = self._inner(rest_nodes, f"{self.path}.items")
        if most is not None and most < least:
            return None
        return ArrayShape(tuple(prefix), items, least, most)

    def _object_shape(self, flats: Sequence[Mapping[str, Any]]) -> ObjectShape | None:
        least, most = _bounds(flats, "minProperties", "maxProperties")
        if most is not None and most < least:
            return None
        keys: dict[str, None] = {}
        required: dict[str, None] = {}
        said = False
        others: list[Any] = []
        for flat in flats:
            keys.update(dict.fromkeys(flat.get("properties", ())))
            required.update(dict.fromkeys(flat.get("required", ())))
            if "patternProperties" in flat or _names_elsewhere(flat):
                said = True  # what those keys hold is checked
            if "additionalProperties" in flat and "patternProperties" not in flat:
                said = True
                others.append(flat["additionalProperties"])
            elif (
                flat.get("unevaluatedProperties") is False
                and "patternProperties" not in flat
                and len(_COMBINING.intersection(flat)) == 1
            ):
                said = True
                others.append(False)
        properties = []
        place = f"{self.path}.properties" if self.path else "properties"
        for key in [*keys, *(key for key in required if key not in keys)]:
            nodes = []
            for flat in flats:
                known = flat.get("properties", {})
                if key in known:
                    nodes.append(known[key])
                elif "patternProperties" not in flat:
                    nodes.append(flat.get("additionalProperties", True))
            if any(node is False for node in nodes):
                if key in required:
                    return None
                continue
            properties.append(Property(key, self._inner(nodes, _step(place, key)), key in required))
        closed = any(node is False for node in others) or (bool(keys) and not said)
        additional = None if closed else self._inner(others, f"{self.path}.additionalProperties")
        if most is not None and most <= len(required):
            if most < len(required):
                return None
            properties, additional = [one for one in properties if one.required], None
        return ObjectShape(tuple(properties), additional, least, most)


_ONLY: dict[str, Mapping[str, Any]] = {kind: {"type": kind} for kind in ("object", "array", "string")}
#: Keywords that look at the same value through other schemas.
_COMBINING = frozenset(
    {
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "dependentSchemas",
        "dependencies",
        "nullable",
        "unevaluatedProperties",
        "unevaluatedItems",
    }
)
#: Keywords that leave an enum's member as it is.
_PLAIN_KEYS = frozenset(
    {
        "type",
        "enum",
        "const",
        "title",
        "description",
        "default",
        "examples",
        "nullable",
        "$defs",
        "definitions",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$comment",
        "deprecated",
        "$schema",
        "$id",
    }
)
#: Keywords that make more than one branch of a node, or none.
_EXPANDED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "nullable", "enum", "const"})
_FREE: tuple[Alternative, ...] = (StringRule(), NumberRule())


#: In place of options that are not looked into: they may name keys of their own.
_OPEN: Mapping[str, Any] = {"patternProperties": {}}


def _names_elsewhere(node: Mapping[str, Any]) -> bool:
    """Whether keywords that are only checked may admit keys that the node does not declare."""
    if _CONDITIONS.isdisjoint(node):
        return False
    parts = [node.get("then"), node.get("else"), *node.get("dependentSchemas", {}).values()]
    parts += [part for part in node.get("dependencies", {}).values() if not isinstance(part, list)]
    return any(isinstance(part, Mapping) and not part.keys() <= {"required"} for part in parts)


_CONDITIONS = frozenset({"then", "else", "dependentSchemas", "dependencies"})


def _types(node: Mapping[str, Any]) -> frozenset[str]:
    types = node.get("type")
    return _ALL if types is None else _type_set(types if isinstance(types, str) else tuple(types))


@lru_cache(maxsize=256)
def _type_set(types: str | tuple[str, ...]) -> frozenset[str]:
    names = {types} if isinstance(types, str) else set(types)
    return frozenset((names - {"number"}) | ({"integer", "fraction"} if "number" in names else set()))


def _type(value: Any) -> frozenset[str]:
    """Return the types that a value has: those of its own that intersect."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, (int, float)):
        return frozenset({"integer" if isinstance(value, int) or value.is_integer() else "fraction"})
    return frozenset({"string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"})


_TRUTH = object()


def _frozen(value: Any) -> Any:
    """Return what is equal for values that are equal in JSON, and hashable: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, Mapping):
        return frozenset((key, _frozen(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return (_TRUTH, value) if isinstance(value, bool) else value


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON."""
    return bool(_frozen(one) == _frozen(other))


def _values(value: Any) -> int:
    """Return how many values there are in a value, itself included."""
    count, pending = 0, [value]
    while pending:
        found = pending.pop()
        count += 1
        if isinstance(found, Mapping):
            pending.extend(found.values())
        elif isinstance(found, list):
            pending.extend(found)
    return count


def _bounds(flats: Sequence[Mapping[str, Any]], low: str, high: str) -> tuple[int, int | None]:
    highs = [int(flat[high]) for flat in flats if high in flat]
    return max((int(flat[low]) for flat in flats if low in flat), default=0), min(highs) if highs else None


def _string_rule(flats: Sequence[Mapping[str, Any]]) -> StringRule | None:
    least, most = _bounds(flats, "minLength", "maxLength")
    if most is not None and most < least:
        return None
    patterns = list(dict.fromkeys(flat["pattern"] for flat in flats if "pattern" in flat))
    # A grammar holds one; the others are checked.
    return StringRule(None, patterns[0] if patterns else None, least, most)


def _exact(value: Any) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def _number_rule(flats: Sequence[Mapping[str, Any]], integer: bool) -> NumberRule | None:
    low: tuple[Decimal, bool] | None = None
    high: tuple[Decimal, bool] | None = None
    for flat in flats:
        for keyword, out in (("minimum", False), ("exclusiveMinimum", True)):
            if keyword in flat:
                found = (_exact(flat[keyword]), out)
                low = found if low is None else max(low, found)
        for keyword, out in (("maximum", False), ("exclusiveMaximum", True)):
            if keyword in flat:
                value = _exact(flat[keyword])
                if high is None or value < high[0] or (value == high[0] and out):
                    high = (value, out)
    rule = NumberRule(
        integer, low[0] if low else None, high[0] if high else None, bool(low and low[1]), bool(high and high[1])
    )
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    if integer:
        least, most = rule.integers()
        if least is not None and most is not None and least > most:
            return None
    return rule


# The check of values ---------------------------------------------------------------------------------------------


def _value_path(parts: Sequence[Any]) -> str:
    path = ""
    for part in parts:
        path = f"{path}[{part}]" if isinstance(part, int) else _step(path, part)
    return path


_PLAIN_KEY = re.compile(r"[A-Za-z0-9_$-]+")


def _step(path: str, key: str) -> str:
    if not _PLAIN_KEY.fullmatch(key):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _no_registry() -> Any:
    """Return a registry that holds nothing and retrieves nothing."""
    from referencing import Registry

    return Registry()


class _TooManyChecksError(Exception):
    """References have a value checked again and again."""


class _Left(threading.local):
    """How many keywords may still be checked in the value that this thread looks at."""

    checks = 0


_LEFT = _Left()


@lru_cache(maxsize=1)
def _validator_class() -> Any:
    """Return Draft 2020-12 with `nullable`, Draft 7's `items` array and `dependencies`, and ECMA's patterns.

    Patterns, `uniqueItems` and the number of checks are bounded in time, and `multipleOf` is exact in decimals.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend

    def unless_null(check: Callable[..., Any]) -> Callable[..., Any]:
        def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            _LEFT.checks -= 1
            if _LEFT.checks < 0:
                raise _TooManyChecksError
            if instance is None and schema.get("nullable") is True:
                return ()
            return check(validator, value, instance, schema)

        return checked

    known = dict(Draft202012Validator.VALIDATORS)

    def pattern(validator: Any, value: str, instance: Any, schema: Any) -> Iterator[Any]:
        if not isinstance(instance, str):
            return
        try:
            if not search(value, instance):
                yield ValidationError(f"{instance!r} does not match {value!r}")
        except TooCostlyError:
            yield ValidationError(f"would take too long to be matched with {value!r}")

    def matching(patterns: Iterable[str], key: str) -> list[str]:
        try:
            return [one for one in patterns if search(one, key)]
        except TooCostlyError:
            raise _TooManyChecksError from None

    def pattern_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, Mapping):
            for key, inner in instance.items():
                for found in matching(value, key):
                    yield from validator.descend(inner, value[found], path=key, schema_path=found)

    def additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not isinstance(instance, Mapping):
            return
        declared, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for key, inner in instance.items():
            if key not in declared and not matching(patterns, key):
                if value is False:
                    yield ValidationError(f"{key!r} is not declared, and additional properties are not allowed")
                else:
                    yield from validator.descend(inner, value, path=key)

    def unique_items(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if value and isinstance(instance, list) and len(set(map(_frozen, instance))) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")

    def multiple_of(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        # In binary fractions 19.99 is no multiple of 0.01.
        if validator.is_type(instance, "number") and Fraction(_exact(instance)) % Fraction(_exact(value)):
            yield ValidationError(f"{instance!r} is not a multiple of {value!r}")

    def items(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not isinstance(value, list):
            yield from known["items"](validator, value, instance, schema)
        elif isinstance(instance, list):
            rest = schema.get("additionalItems", True)
            for index, item in enumerate(instance):
                node = value[index] if index < len(value) else rest
                yield from validator.descend(item, node, path=index)

    def dependencies(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        for key, needed in value.items():
            keyword = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
            yield from known[keyword](validator, {key: needed}, instance, schema)

    checks = {
        **known,
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
        "uniqueItems": unique_items,
        "multipleOf": multiple_of,
        "items": items,
        "dependencies": dependencies,
    }
    wrapped = {keyword: unless_null(check) for keyword, check in checks.items()}
    return extend(Draft202012Validator, wrapped)  # type: ignore[no-untyped-call]


_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"


@lru_cache(maxsize=1)
def _formats() -> Any:
    from jsonschema import FormatChecker

    checker = FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))
    time = re.compile(_TIME)

    @checker.checks("time")
    def is_time(value: object) -> bool:
        return not isinstance(value, str) or time.fullmatch(value) is not None

    @checker.checks("date-time")
    def is_moment(value: object) -> bool:
        if not isinstance(value, str):
            return True
        return value[10:11] in ("T", "t", " ") and checker.conforms(value[:10], "date") and is_time(value[11:])

    return checker


# The check of schemas --------------------------------------------------------------------------------------------


def check_schema(node: Any, path: str) -> None:
    """Refuse what is not a schema, or one that no value or no grammar can meet.

    Raises:
        RequestError: with the JSON path of the fault and its value.
    """
    _Check(node).document_at(path)


def _refuse(path: str, what: str, value: Any) -> RequestError:
    return RequestError(path, f"must be {what}, not {shown(value)}")


class _Check:
    """One walk over a schema. `_KEYWORDS` has the check of each keyword; unknown ones are annotations."""

    def __init__(self, root: Any) -> None:
        self.document = _Document(root)
        self.left = MAX_NODES
        self._seen: set[int] = set()
        #: What references point at, and from where.
        self._targets: list[tuple[Any, str]] = []
        self._visits: dict[int, int] = {}

    def document_at(self, path: str) -> None:
        """Check the whole document."""
        root = self.document.root
        self.node(root, path, 0)
        if any("unevaluatedProperties" in node for node in _nodes(root)):
            for node in _nodes(root):
                patterns = node.get("patternProperties")
                if id(node) in self._seen and isinstance(patterns, Mapping) and any(map(repeats_a_group, patterns)):
                    raise RequestError(
                        path, "unevaluatedProperties and a repeated group in patternProperties: unbounded"
                    )
        if self._targets:
            for node, place in self._targets:
                # It may stand where no keyword has a schema.
                if id(node) not in self._seen:
                    self.node(node, place, 0)
            try:
                for node in _nodes(root):
                    if id(node) in self._seen and self._visited(node) > MAX_VISITS:
                        raise RequestError(
                            path, f"its references multiply to more than {MAX_VISITS} schemas of one value"
                        )
            except RecursionError:
                raise RequestError(path, "refers to its definitions in too deep a chain") from None

    def _visited(self, node: Any) -> int:
        """Return how many nodes look at one value with this one, itself included."""
        if not isinstance(node, Mapping):
            return 1
        known = self._visits.get(id(node))
        if known is None:
            self._visits[id(node)] = 1  # a node that refers to itself does not look twice
            inner = [node[keyword] for keyword in ("not", "if", "then", "else") if keyword in node]
            for keyword in ("allOf", "anyOf", "oneOf"):
                inner += node.get(keyword, ())
            for keyword in ("dependentSchemas", "dependencies"):
                inner += node.get(keyword, {}).values()
            if "$ref" in node:
                inner.append(self.document.target(node["$ref"]))
            known = self._visits[id(node)] = min(1 + sum(map(self._visited, inner)), MAX_VISITS + 1)
        return known

    def node(self, node: Any, path: str, depth: int) -> None:
        if isinstance(node, bool):
            return
        if not isinstance(node, Mapping):
            raise _refuse(path, "a JSON Schema (an object, true or false)", node)
        self._seen.add(id(node))
        self.left -= 1
        if self.left < 0:
            raise RequestError(path, f"the schema has more than {MAX_NODES} nodes and enum members")
        if depth > MAX_DEPTH:
            raise RequestError(path, f"the schema nests deeper than {MAX_DEPTH} levels")
        for keyword, value in node.items():
            check = _KEYWORDS.get(keyword)
            if check is not None:
                check(self, value, _step(path, keyword), depth)
        if len(node) > 1:
            _contradictions(node, path)

    # One method for each kind of a keyword's value.

    def schema(self, value: Any, path: str, depth: int) -> None:
        self.node(value, path, depth + 1)

    def schemas(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, list) or not value:
            raise _refuse(path, "an array of one schema or more", value)
        for index, inner in enumerate(value):
            self.node(inner, f"{path}[{index}]", depth + 1)

    def items(self, value: Any, path: str, depth: int) -> None:
        (self.schemas if isinstance(value, list) else self.schema)(value, path, depth)

    def named(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise _refuse(path, "an object of schemas", value)
        for key, inner in value.items():
            if not isinstance(key, str):
                raise _refuse(path, "an object whose keys are strings", key)
            place = _step(path, key)
            _text(key, place)
            self.node(inner, place, depth + 1)

    def properties(self, value: Any, path: str, depth: int) -> None:
        self.named(value, path, depth)
        if len(value) > MAX_PROPERTIES:
            raise RequestError(path, f"has {len(value)} properties, more than {MAX_PROPERTIES}")
        for key in value:
            if len(key) > MAX_KEY:
                raise RequestError(path, f"the property {shown(key)} has more than {MAX_KEY} characters")

    def patterns(self, value: Any, path: str, depth: int) -> None:
        self.named(value, path, depth)
        for key in value:
            self.pattern(key, path, depth)

    def dependencies(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise _refuse(path, "an object", value)
        for key, inner in value.items():
            (self.keys if isinstance(inner, list) else self.schema)(inner, _step(path, key), depth)

    def dependent(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise _refuse(path, "an object", value)
        for key, inner in value.items():
            self.keys(inner, _step(path, key), depth)

    def keys(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, list) or not all(isinstance(key, str) for key in value):
            raise _refuse(path, "an array of strings", value)
        if len(set(value)) != len(value):
            raise _refuse(path, "an array of different strings", value)
        for index, key in enumerate(value):
            _text(key, f"{path}[{index}]")
            if len(key) > MAX_KEY:
                raise RequestError(f"{path}[{index}]", f"{shown(key)} has more than {MAX_KEY} characters")

    def types(self, value: Any, path: str, depth: int) -> None:
        names = value if isinstance(value, list) else [value]
        if not names:
            raise _refuse(path, "a type or an array of types", value)
        for index, name in enumerate(names):
            place = f"{path}[{index}]" if names is value else path
            if not isinstance(name, str) or name not in _TYPES:
                raise _refuse(place, f"one of {', '.join(_TYPES)}", name)
        if len(set(names)) != len(names):
            raise _refuse(path, "an array of different types", value)

    def members(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, list) or not value:
            raise _refuse(path, "an array of one value or more", value)
        self.left -= len(value)
        if self.left < 0:
            raise RequestError(path, f"the schema has more than {MAX_NODES} nodes and enum members")
        for index, inner in enumerate(value):
            _json(inner, f"{path}[{index}]", depth)

    def constant(self, value: Any, path: str, depth: int) -> None:
        _json(value, path, depth)

    def number(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
            raise _refuse(path, "a number", value)

    def positive(self, value: Any, path: str, depth: int) -> None:
        self.number(value, path, depth)
        if value <= 0:
            raise _refuse(path, "more than 0", value)

    def count(self, value: Any, path: str, depth: int) -> None:
        whole = isinstance(value, (int, float)) and not isinstance(value, bool) and _finite(value)
        if not whole or value != int(value) or value < 0:
            raise _refuse(path, "a whole number of at least 0", value)

    def flag(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, bool):
            raise _refuse(path, "true or false", value)

    def string(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, str):
            raise _refuse(path, "a string", value)

    def annotation(self, value: Any, path: str, depth: int) -> None:
        if value is not None:  # Go's and Pydantic's tools say null where they say nothing
            self.string(value, path, depth)

    def pattern(self, value: Any, path: str, depth: int) -> None:
        self.string(value, path, depth)
        if len(value) > MAX_PATTERN:
            raise RequestError(path, f"has more than {MAX_PATTERN} characters")
        try:
            compiled(value)
            if not bounded(value):
                raise RequestError(path, f"{shown(value)} repeats a group beside flags or back references: unbounded")
        except (re.error, RecursionError, OverflowError) as error:
            raise RequestError(path, f"{shown(value)} is no regular expression: {error}") from None

    def reference(self, value: Any, path: str, depth: int) -> None:
        self.string(value, path, depth)
        if not value.startswith("#"):
            raise RequestError(path, f"{shown(value)} points outside the schema: only `#...` is followed")
        try:
            target = self.document.target(value)
        except (KeyError, StopIteration):
            raise RequestError(path, f"{shown(value)} points at nothing in the schema") from None
        if not isinstance(target, (Mapping, bool)):
            raise RequestError(path, f"{shown(value)} points at {shown(target)}, which is no schema")
        self._targets.append((target, path))

    def identifier(self, value: Any, path: str, depth: int) -> None:
        self.string(value, path, depth)
        if depth and not value.startswith("#"):
            raise RequestError(path, f"{shown(value)}: a schema inside a schema cannot have an address of its own")

    def dynamic(self, value: Any, path: str, depth: int) -> None:
        raise RequestError(path, "dynamic references are not supported; use $ref")


_KEYWORDS: dict[str, Callable[[_Check, Any, str, int], None]] = {
    **dict.fromkeys(
        (
            "additionalProperties",
            "additionalItems",
            "contains",
            "propertyNames",
            "not",
            "if",
            "then",
            "else",
            "unevaluatedItems",
            "unevaluatedProperties",
        ),
        _Check.schema,
    ),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _Check.schemas),
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas"), _Check.named),
    "properties": _Check.properties,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _Check.number),
    **dict.fromkeys(
        (
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
            "minProperties",
            "maxProperties",
            "minContains",
            "maxContains",
        ),
        _Check.count,
    ),
    **dict.fromkeys(("uniqueItems", "nullable"), _Check.flag),
    **dict.fromkeys(("format", "title", "description", "$schema"), _Check.annotation),
    "$anchor": _Check.string,
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), _Check.dynamic),
    "items": _Check.items,
    "patternProperties": _Check.patterns,
    "dependencies": _Check.dependencies,
    "dependentRequired": _Check.dependent,
    "required": _Check.keys,
    "type": _Check.types,
    "enum": _Check.members,
    "const": _Check.constant,
    "multipleOf": _Check.positive,
    "pattern": _Check.pattern,
    "$ref": _Check.reference,
    "$id": _Check.identifier,
}

_PAIRS = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minContains", "maxContains"),
)


def _contradictions(node: Mapping[str, Any], path: str) -> None:
    for low, high in _PAIRS:
        if low in node and high in node and node[low] > node[high]:
            raise RequestError(_step(path, low), f"is {node[low]}, more than {high} {node[high]}: no value has both")
    if not _BOUNDS.isdisjoint(node):
        types = _types(node)
        if "integer" in types and _number_rule((node,), "fraction" not in types) is None and len(types) <= 2:
            named = ", ".join(f"{key} {node[key]}" for key in node if key in _BOUNDS)
            raise RequestError(path, f"no {'number' if 'fraction' in types else 'integer'} is within {named}")
    if "required" in node and node.get("additionalProperties") is False and "patternProperties" not in node:
        known = node.get("properties", {})
        for index, key in enumerate(node["required"]):
            if key not in known:
                place = f"{_step(path, 'required')}[{index}]"
                raise RequestError(place, f"{key!r} is no property, and additionalProperties is false")
            if known[key] is False:
                place = f"{_step(path, 'required')}[{index}]"
                raise RequestError(place, f"the property {key!r} is false: it cannot be")
    if "type" in node:
        types = _types(node)
        for keyword in ("enum", "const"):
            if keyword in node:
                values = node["enum"] if keyword == "enum" else [node["const"]]
                null = node.get("nullable") is True
                if not null and not any(_type(one) & types for one in values):
                    named = f"{node['type']}: {shown(node[keyword])}"
                    raise RequestError(_step(path, keyword), f"no value is of type {named}")


_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


def _finite(value: int | float) -> bool:
    return value.bit_length() <= _MOST_BITS if isinstance(value, int) else math.isfinite(value)


def _text(value: str, path: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(path, f"{value!r} holds a lone surrogate, which no text can") from None


def _json(value: Any, path: str, depth: int) -> None:
    """Refuse what a JSON text has no words for."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if not _finite(value):
            raise RequestError(path, f"must have at most {_MOST_BITS} bits, not {value.bit_length()}")
        return
    if depth > MAX_DEPTH:
        raise RequestError(path, f"the value nests deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        _text(value, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _refuse(path, "a finite number", value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise _refuse(path, "an object whose keys are strings", key)
            _text(key, path)
            _json(inner, _step(path, key), depth + 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _json(inner, f"{path}[{index}]", depth + 1)
    else:
        raise _refuse(path, "a JSON value", value)
