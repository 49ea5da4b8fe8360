"""Clients of one Redis, or of a Redis Cluster, from a URL and the files that hold what a URL should not."""

import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError

from agentspec.config import CacheConfig
from agentspec.errors import ConfigError

Client = Redis | RedisCluster

CLUSTER = "+cluster"
"""What the scheme of a cluster's URL ends with."""

SOCKET_S = 6.0
"""Longest wait of a connection for anything, in seconds: more than any call may take, as a client of a cluster asks for
its map anew after such a wait, which would hold up the calls to all nodes."""


@cache
def script(name: str) -> str:
    """The text of a Lua script of `cache/lua`."""
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text()


def connect(config: CacheConfig, connections: int) -> Client:
    """A client that connects when it is first used, and again once when a pooled connection is dead.

    `connections` is the most of them to one server. Raises `ConfigError` that names the setting at fault.
    """
    url = with_password(config.redis_url, config.redis_password_file)
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 1),
        "retry_on_error": [RedisConnectionError],
        "health_check_interval": 30,
        "socket_keepalive": True,
        "socket_timeout": SOCKET_S,
        "socket_connect_timeout": SOCKET_S,
        "max_connections": connections,
    }
    if config.redis_ca_file:
        options["ssl_ca_certs"] = checked_ca(url, config.redis_ca_file)
    try:
        if url.partition("://")[0].endswith(CLUSTER):
            return cluster(url, options)
        client = Redis.from_url(url, **options)
        pool: Any = client.connection_pool
        pool.make_connection()
        return client
    except (TypeError, ValueError, RedisClusterException) as error:
        shown = re.sub(r"//[^/@]*@", "//...@", config.redis_url)
        raise ConfigError(f"AGENTSPEC_CACHE_REDIS_URL must be a Redis URL, got {shown!r}: {error}") from None


def cluster(url: str, options: dict[str, Any]) -> RedisCluster:
    """A client of the cluster that the hosts of a URL, joined by commas, belong to."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    login, at, hosts = place.rpartition("@")
    first, *others = hosts.split(",")
    base = scheme.removesuffix(CLUSTER)
    parsed = [parse_url(f"{base}://{login}{at}{host}{slash}{path}") for host in (first, *others)]
    nodes = [ClusterNode(str(found.get("host", "localhost")), int(found.get("port", 6379))) for found in parsed]
    common = {name: value for name, value in parsed[0].items() if name not in ("host", "port", "connection_class")}
    return RedisCluster(startup_nodes=nodes, require_full_coverage=False, ssl=base == "rediss", **{**options, **common})


def with_password(url: str, file: str) -> str:
    """A URL with the password that a file holds; the user stays as it is."""
    if not file:
        return url
    try:
        password = Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"AGENTSPEC_CACHE_REDIS_PASSWORD_FILE: cannot read {file!r}: {error}") from None
    if not password:
        raise ConfigError(f"AGENTSPEC_CACHE_REDIS_PASSWORD_FILE: {file!r} is empty")
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    login, _, hosts = place.rpartition("@")
    if ":" in login:
        raise ConfigError("AGENTSPEC_CACHE_REDIS_PASSWORD_FILE: the URL has a password already")
    return f"{scheme}://{login}:{quote(password, safe='')}@{hosts}{slash}{path}"


def checked_ca(url: str, file: str) -> str:
    """A file of certificates, for a URL that needs one."""
    if urlsplit(url).scheme.removesuffix(CLUSTER) != "rediss":
        raise ConfigError("AGENTSPEC_CACHE_REDIS_CA_FILE needs a URL that begins with rediss://")
    if not Path(file).is_file():
        raise ConfigError(f"AGENTSPEC_CACHE_REDIS_CA_FILE: there is no file {file!r}")
    return file


def node_of(client: Client, key: str) -> str:
    """Name of the server that holds a key; empty where there is one only, or which is not known yet."""
    if isinstance(client, Redis):
        return ""
    try:
        node = client.get_node_from_key(key)
    except (RedisError, RedisClusterException, IndexError):
        return ""
    return node.name if node is not None else ""
