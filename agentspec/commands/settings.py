"""Settings as the command line shows and sets them: names, variables, defaults and meaning from the dataclasses."""

import argparse
import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeGuard, get_type_hints

from agentspec import config as config_module
from agentspec.config import Config, load, parse


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the configuration."""

    part: str
    field: str
    kind: type
    default: Any
    meaning: str
    bounds: Mapping[str, Any]
    """Least and most of a number, words of a text, where the field says so."""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"AGENTSPEC_{self.part}_{self.field}".upper()

    def value(self, config: Config) -> Any:
        """Its value in a configuration."""
        return getattr(getattr(config, self.part), self.field)


def all_settings() -> Iterator[Setting]:
    """Every setting, by part, in the order of the dataclasses."""
    config = Config()
    meanings = documented_fields()
    for part in fields(Config):
        section = getattr(config, part.name)
        kinds = get_type_hints(type(section))
        for field in fields(section):
            meaning = meanings.get((type(section).__name__, field.name), "")
            yield Setting(
                part.name, field.name, kinds[field.name], getattr(section, field.name), meaning, field.metadata
            )


def documented_fields() -> dict[tuple[str, str], str]:
    """The strings under the fields of the configuration's classes, by class and field."""
    found = {}
    for node in ast.parse(inspect.getsource(config_module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_string(text):
                found[node.name, field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def is_string(node: ast.stmt) -> TypeGuard[ast.Expr]:
    """Whether a statement is a bare string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def add_settings(parser: argparse._ActionsContainer, *names: str) -> None:
    """Adds a flag for each named setting (`part.field`): `--field`, or `--part` for a part's name."""
    known = {f"{setting.part}.{setting.field}": setting for setting in all_settings()}
    for name in names:
        setting = known[name]
        meaning = setting.meaning.replace("%", "%%") or f"{setting.field.replace('_', ' ')} of the {setting.part}"
        default = f"default {setting.default}" if setting.default != "" else "default none"
        parser.add_argument(
            flag(setting),
            dest=name,
            metavar=placeholder(setting),
            help=f"{meaning.rstrip('.')} ({default}; {setting.variable})",
        )


def placeholder(setting: Setting) -> str:
    """What stands for a setting's value in a usage line."""
    if issubclass(setting.kind, StrEnum):
        return "|".join(setting.kind)
    if "words" in setting.bounds:
        return "|".join(setting.bounds["words"])
    return {int: "N", float: "N", Path: "FOLDER"}.get(setting.kind, setting.field.upper())


def flag(setting: Setting) -> str:
    """The command-line flag of a setting."""
    name = setting.part if setting.field == "name" else setting.field
    return f"--{name.replace('_', '-')}"


def chosen_config(arguments: argparse.Namespace) -> Config:
    """The environment's configuration with the flags that were given."""
    config = load()
    for setting in all_settings():
        text = getattr(arguments, f"{setting.part}.{setting.field}", None)
        if text is not None:
            value = parse(flag(setting), setting.kind, text, setting.bounds)
            section = replace(getattr(config, setting.part), **{setting.field: value})
            config = replace(config, **{setting.part: section})
    return config


def in_flags(message: str, arguments: argparse.Namespace) -> str:
    """A message about settings that names each as it was given: by its flag, if that was used, else by its variable."""
    for setting in all_settings():
        if getattr(arguments, f"{setting.part}.{setting.field}", None) is not None:
            message = re.sub(rf"\b{setting.variable}\b", flag(setting), message)
    return message


def shown(value: Any) -> str:
    """A value for the eye, without the password of a URL."""
    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1:***@", str(value))
