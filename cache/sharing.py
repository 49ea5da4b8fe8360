"""Indexing in chunks: neither drafting nor the event loop waits long, and what was deleted meanwhile stays out."""

import asyncio
from collections.abc import Callable

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.history import STRETCH, Conversation, ScopeHistory, TrajectoryHistory, Turn
from agentspec.cache.rolling import OVERLAP, Document

CHUNK = 2048
"""Tokens indexed under one hold of a scope's lock: a few milliseconds."""

Gone = Callable[[], bool]
"""Whether a trajectory was deleted since its text was read; asked whenever something else may have run."""


async def extend(history: TrajectoryHistory, conversation: Conversation, tokens: Int32s) -> None:
    """Index tokens of a conversation. Cancelling frees the conversation."""
    try:
        for start in range(0, tokens.size, CHUNK):
            with history.scope.lock:
                history.extend(conversation, tokens[start : start + CHUNK])
            if start + CHUNK < tokens.size:
                await asyncio.sleep(0)
    except BaseException:
        conversation.busy = False
        raise


async def restore(history: TrajectoryHistory, stored: list[Int32s]) -> None:
    """Index the stored documents of a history that is new, until it is deleted."""
    for document in stored:
        if history.deleted:
            return
        with history.scope.lock:
            conversation = history.resume()
        await extend(history, conversation, document)
        with history.scope.lock:
            history.save(conversation)
            conversation.busy = False


async def absorb(history: TrajectoryHistory, document: Int32s, gone: Gone) -> None:
    """Index a document of a trajectory's history that no prompt here extends, unless it is known."""
    with history.scope.lock:
        if gone() or history.index.known(document) == document.size:
            return
    written = Document()
    for start in range(0, document.size, CHUNK):
        with history.scope.lock:
            if gone():
                return
            history.index.extend(written, document[start : start + CHUNK])
        await asyncio.sleep(0)


async def share(scope: ScopeHistory, name: str, turn: Turn, gone: Gone) -> None:
    """Add a trajectory's turn to what its scope shares. What the scope already knows of its start is left out."""
    with scope.lock:
        if gone():
            return
        known = scope.index.known(turn.new)
        scope.learns_from(name)
    skipped = known if known >= STRETCH else 0
    document = Document(np.concatenate((turn.overlap, turn.new[:skipped]))[-OVERLAP:])
    for start in range(skipped, turn.new.size, CHUNK):
        with scope.lock:
            if gone():
                return
            scope.index.extend(document, turn.new[start : start + CHUNK])
        if start + CHUNK < turn.new.size:
            await asyncio.sleep(0)
