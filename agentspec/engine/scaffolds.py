"""Scaffolds of requests, built in a thread of their own, and kept for the requests that come with the same tools."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from agentspec.cache.index import SuffixIndex
from agentspec.cache.scaffold import indexed
from agentspec.config import CacheConfig
from agentspec.engine.chat import Chat
from agentspec.engine.outline import documents
from agentspec.types import Outline, Scope

log = logging.getLogger(__name__)

MAX_WAITING = 16
"""Scaffolds that wait to be built; a request that would add one more goes without."""

Key = tuple[Scope, bytes]


class Scaffolds:
    """Finds the scaffolds of one model's requests. Nothing crosses a scope. Belongs to one thread."""

    def __init__(self, chat: Chat, config: CacheConfig) -> None:
        self.chat = chat
        self.tokens = config.scaffold_tokens
        self.limit = config.scaffold_bytes
        self._kept: OrderedDict[Key, Future[SuffixIndex]] = OrderedDict()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="scaffold")

    def find(self, scope: Scope, outline: Outline) -> Callable[[], SuffixIndex | None] | None:
        """What gives the scaffold once it is built, and None before; None where there is nothing to build."""
        if not self.tokens or not (outline.tools or outline.schema is not None):
            return None
        key = scope, outline.digest
        found = self._kept.pop(key, None)
        if found is None:
            if sum(not building.done() for building in self._kept.values()) >= MAX_WAITING:
                return None
            found = self._executor.submit(self._build, outline)
        self._kept[key] = found
        self._settle()
        return lambda: found.result() if found.done() else None

    def forget(self, scope: Scope) -> None:
        """Drop all of a scope."""
        for key in [key for key in self._kept if key[0] == scope]:
            del self._kept[key]

    @property
    def bytes(self) -> int:
        """Memory of the indexes that are built."""
        return sum(index.bytes for index in self._built())

    def close(self) -> None:
        """End the thread once it has built what it is building."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._kept.clear()

    def _built(self) -> list[SuffixIndex]:
        return [found.result() for found in self._kept.values() if found.done()]

    def _settle(self) -> None:
        """Drop the least recently used ones until the others fit; what is being built stays."""
        excess = self.bytes - self.limit
        for key, found in list(self._kept.items()):
            if excess <= 0:
                return
            if found.done():
                excess -= found.result().bytes
                del self._kept[key]

    def _build(self, outline: Outline) -> SuffixIndex:
        """The index of a scaffold; an empty one where the template or a schema cannot be made sense of."""
        try:
            return indexed(documents(self.chat, outline, self.tokens))
        except Exception:
            log.warning("no drafts from the tools of a request", exc_info=True)
            return SuffixIndex()
