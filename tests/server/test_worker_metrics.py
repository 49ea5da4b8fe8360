"""Every figure of a worker is explained where it is shown."""

import asyncio
from pathlib import Path

from agentspec.cache.file_store import FileStore
from agentspec.cache.redis_store import RedisStore
from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig
from agentspec.engine.service import Engine
from agentspec.server.worker_metrics import HELP
from tests.serving import with_engine


def names_of_stores(folder: Path) -> set[str]:
    """The names that histories give with each store; no Redis is asked for them."""

    async def names() -> set[str]:
        in_redis = RedisStore(CacheConfig(redis_url="redis://127.0.0.1:1/0"))
        in_file = FileStore(CacheConfig(history_file=str(folder / "histories")))
        alone = Histories(CacheConfig())
        found = [{*one.stats()} for one in (in_redis, in_file, alone)]
        for one in (in_redis, in_file, alone):
            await one.close()
        return set().union(*found)

    return asyncio.run(names())


def test_every_figure_of_the_worker_has_a_help_text_and_no_text_is_left_over(tiny_model: Path, tmp_path: Path) -> None:
    given = names_of_stores(tmp_path)

    async def scenario(engine: Engine) -> None:
        given.update(engine.stats())

    with_engine(tiny_model, scenario)
    assert given == set(HELP)
    assert all(text.endswith(".") and len(text) > 12 for text in HELP.values())
    assert len(set(HELP.values())) == len(HELP)
