"""Settings: frozen records with their defaults, and the one function that reads the environment.

Every field can be set as `AGENTSPEC_<PART>_<FIELD>`, for instance `AGENTSPEC_SERVER_PORT=9000`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from agentspec.errors import ConfigError


def default_home() -> Path:
    """Folder of models and profiles: `$XDG_CACHE_HOME/agentspec`, or `~/.cache/agentspec`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentspec"


LARGEST = 2**53
"""Most that any whole number may be: beyond it, seconds and bytes no longer add up."""


def bounded(default: Any, least: int = 0, most: int = LARGEST) -> Any:
    """A field whose value must lie between two bounds, themselves included."""
    return field(default=default, metadata={"least": least, "most": most})


def worded(default: str, *words: str) -> Any:
    """A text that must be one of some words; N in them stands for a whole number."""
    return field(default=default, metadata={"words": words})


class Dtype(StrEnum):
    """What a target computes with."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    """Weights, and what they are multiplied with, rounded to 8 bits in groups: a model of its own, about the same."""


class PrefixSharing(StrEnum):
    """Who may start from a prefix that was computed for another request; how quick that is tells that it was."""

    SCOPE = "scope"
    """Requests of the same tenant."""

    ALL = "all"
    """All requests."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served and where models are kept."""

    name: str = "smollm2-135m"
    """A name of `agentspec models list`, a folder with safetensors, a GGUF file, or a hub id (`org/name`)."""

    home: Path = field(default_factory=default_home)
    """Folder of downloaded and converted models."""

    dtype: Dtype = Dtype.FLOAT32
    """What the target computes with: `float32`; on a GPU also `float16` or `bfloat16`; on a CPU also `int8`, which
    takes a quarter of the memory for weights and about 0.4 of the time of a step without drafts, 0.7 with eight. Where
    the model or the processor does not allow `int8`, the log says so and `float32` is taken."""

    threads: int = bounded(0, most=1024)
    """CPU threads of the target; 0 takes one for each core that this process may use."""

    window: int = 0
    """Most tokens of prompt and completion together; 0 takes the model's own limit."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Batching, memory and drafting of the worker."""

    device: str = worded("cpu", "auto", "cpu", "cuda", "cuda:N")
    """Where the target computes: `cpu`; `cuda`, or `cuda:1` for another GPU than the first, which needs the extra `gpu`
    and has not been run on one yet; or `auto`, a GPU where one can be used, else the CPU."""

    max_running: int = bounded(8, least=1)
    """Requests decoded together; each choice counts as one."""

    max_queue: int = bounded(64, least=1)
    """Requests waiting for a place; one more is refused with 429."""

    prefill_chunk: int = bounded(256, least=1)
    """Prompt tokens computed in one step, of all prompts together, so that a long one does not stall the others."""

    kv_bytes: int = bounded(3 * 1024**3, least=1)
    """KV memory of running and of finished turns together, on the device; what only finished ones hold leaves first,
    least recently used first."""

    prefix_sharing: PrefixSharing = PrefixSharing.SCOPE
    """Whose computed prefixes a request may start from: `scope`, those of its tenant, or `all`."""

    max_draft_tokens: int = 32
    """Most draft tokens of one request in one step, whatever the request says; 0 turns drafting off."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Token histories and their store."""

    redis_url: str = ""
    """Redis that keeps histories and shares them among servers: `redis://host:port/db`, `rediss://...` with TLS, or
    `redis+cluster://host:port,host:port` (`rediss+cluster://...`) for a cluster; empty for none."""

    redis_password_file: str = ""
    """File with the password, for a URL that should not hold one; a user's name stays in the URL."""

    redis_ca_file: str = ""
    """File with the certificates that a `rediss://` server's is checked against; empty takes the system's."""

    history_file: str = ""
    """File in which histories outlive this process, which alone may use it; not together with a Redis."""

    history_file_bytes: int = bounded(256 * 1024**2, least=2 * 1024**2)
    """Largest size of that file; least recently written trajectories leave first."""

    deadline_ms: int = 20
    """Longest wait for a read of the store before a request goes on without it."""

    ttl_s: int = bounded(24 * 3600, least=1, most=2**31 - 1)
    """Lifetime of a stored trajectory after its last write."""

    trajectory_tokens: int = 262_144
    """Most tokens kept of one trajectory; the oldest leave first."""

    scope_tokens: int = 1_000_000
    """Most tokens of finished turns in the index over a scope's recent trajectories."""

    corpora: str = ""
    """Names of corpora that `agentspec corpus build` made, or `.corpus` files, with commas between, at most four: texts
    and runs that drafts of all tenants come from besides histories; empty for none."""

    scaffold_tokens: int = 8192
    """Most tokens of what is drafted from the tools of one request; 0 drafts nothing from them."""

    scaffold_bytes: int = 32 * 1024**2
    """Bytes that the indexes of these may take, all requests' together; least recently used leave first."""

    splice_bytes: int = 16 * 1024**2
    """Bytes that token ids of answers to chats may take, to be put into later prompts of their trajectories in which
    they come back as the same text; least recently used leave first. 0 tokenises every prompt as a whole."""

    memory_bytes: int = 512 * 1024**2
    """Bytes that in-process histories and indexes may take; least recently used leave first."""

    scope_bytes: int = bounded(512 * 1024**2, least=1)
    """Bytes that one tenant may take of them for one model, and once more in the store; its least recently used leave
    first."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` takes requests from other machines, and there are no keys."""

    port: int = bounded(8000, most=65535)
    """Port to listen on; 0 takes a free one."""

    max_body_bytes: int = bounded(8 * 1024**2, least=1)
    """Largest request body; a larger one is refused with 413."""

    receive_s: float = 60.0
    """Longest time for the headers of a request to arrive, and again for its body; then 408 and the connection is
    closed. 0 sets no limit."""

    keepalive_s: float = 10.0
    """A stream that was silent this long gets an SSE comment; 0 sends none."""

    shutdown_s: int = 10
    """Longest wait for running requests at shutdown; then their streams end with an error event."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, by part."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def parse(name: str, kind: type, text: str, bounds: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The value of a setting from its text; raises `ConfigError` that names the setting and the text."""
    words = {int: "a whole number", float: "a number"}
    if kind in words:
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"{name} must be {words[kind]}, got {text!r}") from None
        check_bounds(name, value, text, bounds.get("least", 0), bounds.get("most", LARGEST))
        return value
    if issubclass(kind, StrEnum) and text not in list(kind):
        raise ConfigError(f"{name} must be {' or '.join(kind)}, got {text!r:.60}")
    words = bounds.get("words", ())
    if words and not any(re.fullmatch(word.replace("N", "[0-9]+"), text) for word in words):
        raise ConfigError(f"{name} must be {' or '.join(words)}, got {text!r:.60}")
    return kind(text)


def check_bounds(name: str, value: float, text: str, least: int, most: int) -> None:
    """Raises `ConfigError` for a number that is out of bounds, or none at all."""
    if value < 0:
        raise ConfigError(f"{name} must not be negative, got {text!r}")
    if not least <= value <= most:
        raise ConfigError(f"{name} must be {least} to {most}, got {text:.60}")


def load(env: Mapping[str, str] = os.environ) -> Config:
    """The defaults with what the environment sets. An unknown `AGENTSPEC_` variable is a mistake."""
    config = Config()
    known = {
        f"AGENTSPEC_{part.name}_{setting.name}".upper(): (part.name, setting.name)
        for part in fields(Config)
        for setting in fields(getattr(config, part.name))
    }
    for variable, text in env.items():
        if not variable.startswith("AGENTSPEC_"):
            continue
        if variable not in known:
            raise ConfigError(f"{variable} is not a setting of AgentSpec")
        part, setting = known[variable]
        section = getattr(config, part)
        bounds = type(section).__dataclass_fields__[setting].metadata
        value = parse(variable, get_type_hints(type(section))[setting], text, bounds)
        config = replace(config, **{part: replace(section, **{setting: value})})
    return config
