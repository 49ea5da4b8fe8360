"""Examples of what a JSON schema describes, with blanks for the values that it leaves open.

Nothing in a schema is an error here: what cannot be understood is a blank.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TEXT = "qzxvblankvxzq"
"""A blank for a text, and for anything that is not known better."""

NUMBER = 716052839
"""A blank for a number."""

MAX_LEVELS = 6
"""Levels of an example, references followed included; deeper ones are blanks."""

MAX_ENTRIES = 200
"""Keys and elements of one example, all levels together."""

MAX_VARIANTS = 16
"""Examples of one schema."""


class Example:
    """Makes one example. Variants of even numbers have all properties, each with the next of several allowed values;
    variant 1 has the required properties alone, the others leave out one, two and more of the rest at the end."""

    def __init__(self, root: Mapping[str, Any], variant: int) -> None:
        self.root = root
        self.variant = variant
        self.choice = (variant + 1) // 2
        self.room = MAX_ENTRIES

    def value(self, schema: Any, level: int = 0) -> Any:
        """An example of a schema."""
        if not isinstance(schema, Mapping) or level > MAX_LEVELS:
            return TEXT
        if isinstance(schema.get("$ref"), str):
            return self.value(target(self.root, schema["$ref"]), level + 1)
        given = allowed(schema)
        if given:
            return given[self.choice % len(given)]
        options = [option for name in ("anyOf", "oneOf") for option in list_of(schema.get(name)) if not is_null(option)]
        if options:
            return self.value(options[self.choice % len(options)], level + 1)
        merged = {**schema}
        for part in list_of(schema.get("allOf")):
            merged.update(part if isinstance(part, Mapping) else {})
        return self.typed(merged, level)

    def typed(self, schema: Mapping[str, Any], level: int) -> Any:
        """An example by the schema's type."""
        kinds = [kind for kind in list_of(schema.get("type")) or [schema.get("type")] if kind != "null"]
        kind = kinds[0] if kinds else None
        if kind == "object" or (kind is None and "properties" in schema):
            return self.filled(schema, level)
        if kind == "array" or (kind is None and "items" in schema):
            return self.elements(schema, level)
        if kind == "boolean":
            return self.choice % 2 == 0
        return NUMBER if kind in ("number", "integer") else TEXT

    def filled(self, schema: Mapping[str, Any], level: int) -> dict[str, Any]:
        """An object with the properties of this variant."""
        found: dict[str, Any] = {}
        for name in kept(schema, self.variant):
            if self.room <= 0:
                break
            self.room -= 1
            found[name] = self.value(schema["properties"][name], level + 1)
        return found

    def elements(self, schema: Mapping[str, Any], level: int) -> list[Any]:
        """Two elements, or one."""
        count = min(1 + self.variant % 2, max(self.room, 0))
        self.room -= count
        return [self.value(schema.get("items"), level + 1) for _ in range(count)]


def examples(schema: Any) -> Iterator[Any]:
    """Different examples of a schema, those first that say most."""
    root = schema if isinstance(schema, Mapping) else {}
    for variant in range(variants(root)):
        yield Example(root, variant).value(root)


def variants(schema: Mapping[str, Any]) -> int:
    """How many examples show what there is to choose: values of its properties, and properties at the end."""
    properties = named(schema)
    choices = max((breadth(part) for part in properties.values()), default=1)
    optional = len(properties) - len(required(schema) & set(properties))
    return min(max(2, 2 * choices - 1, 2 * optional), MAX_VARIANTS)


def breadth(schema: Any, level: int = 0) -> int:
    """Allowed values of a schema, or of what it is an array of."""
    if not isinstance(schema, Mapping) or level > MAX_LEVELS:
        return 1
    if schema.get("type") == "boolean":
        return 2
    options = sum(len(list_of(schema.get(name))) for name in ("anyOf", "oneOf"))
    return max(len(allowed(schema)), options, breadth(schema.get("items"), level + 1), 1)


def kept(schema: Mapping[str, Any], variant: int) -> list[str]:
    """The properties of a variant, in their order."""
    names, needed = list(named(schema)), required(schema)
    optional = [name for name in names if name not in needed]
    if variant % 2 == 0:
        return names
    left_out = set(optional if variant == 1 else optional[max(len(optional) - variant // 2, 0) :])
    return [name for name in names if name not in left_out]


def named(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties of a schema."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def required(schema: Mapping[str, Any]) -> set[str]:
    """The names of properties that must be there."""
    return {name for name in list_of(schema.get("required")) if isinstance(name, str)}


def allowed(schema: Mapping[str, Any]) -> Sequence[Any]:
    """The only values that a schema allows; none where it leaves them open."""
    given = [schema["const"]] if "const" in schema else list_of(schema.get("enum"))
    return [value for value in given[:MAX_VARIANTS] if plain(value)]


def plain(value: Any) -> bool:
    """Whether a value is one that any template can print."""
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def target(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference inside a schema points to; None where it points to nothing."""
    found: Any = root if reference.startswith("#") else None
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def is_null(schema: Any) -> bool:
    """Whether a schema describes null alone."""
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def list_of(value: Any) -> Sequence[Any]:
    """A list as it is; nothing for anything else."""
    return value if isinstance(value, list | tuple) else ()
