"""Grammars made into matchers over the model's tokens, by llguidance; each text is compiled once.

Compiling runs in a thread of its own, one grammar at a time: it may take a good part of a second, and neither the
event loop nor the engine's thread waits for it.
"""

import asyncio
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from agentspec.engine.constraint import Constraint, brief
from agentspec.engine.encoder import PlainEncoder
from agentspec.engine.text import TokenBytes
from agentspec.errors import InvalidRequest, Unavailable
from agentspec.types import GenerationRequest, Grammar, GrammarKind

KEPT = 32
"""Compiled grammars kept, least recently used first to leave."""

MAX_TEXT = 128 * 1024
"""Characters of a grammar or schema."""

NO_TEXT = "NoExtensionBias"
"""llguidance's word for a grammar that has no first token."""

LEXER_STATES = 100_000
"""States that the automaton of a grammar's terminals may have; one takes up to 2 KB."""


class Grammars:
    """Compiles the grammars of requests for one model."""

    def __init__(self, tokenizer: Any, token_bytes: TokenBytes, vocabulary: int, end_tokens: Collection[int]) -> None:
        """Keeps what it needs; nothing is built before the first grammar."""
        self._encoder_of = partial(PlainEncoder, tokenizer, token_bytes, vocabulary, end_tokens)
        self.end_tokens = frozenset(end_tokens)
        self._compiled: dict[Grammar, Any] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def constraint(self, request: GenerationRequest) -> Constraint | None:
        """A fresh constraint for a request; None if it has no grammar.

        Raises `InvalidRequest`, which says what is wrong, for a grammar that cannot be compiled or matches nothing.
        """
        if request.grammar is None:
            return None
        try:
            made = self._executor.submit(self._constraint, request, request.grammar)
        except RuntimeError:
            raise Unavailable("the server is shutting down") from None
        return await asyncio.wrap_future(made)

    def _constraint(self, request: GenerationRequest, grammar: Grammar) -> Constraint:
        matcher = self._matcher(grammar)
        silent_stops = [token for token in request.stop_tokens if not self._plain[token]]
        return Constraint(
            matcher,
            self._plain,
            self.end_tokens.union(silent_stops),
            param=grammar.param,
            ends_early=not request.ignore_eos,
            spoiled=partial(self._compiled.pop, grammar, None),
        )

    def close(self) -> None:
        """End the compiling thread; later calls raise `Unavailable`."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, grammar: Grammar) -> Any:
        """A matcher at the grammar's start, for one request."""
        compiled = self._compiled.pop(grammar, None) or self._compile(grammar)
        self._compiled[grammar] = compiled
        while len(self._compiled) > KEPT:
            self._compiled.pop(next(iter(self._compiled)), None)
        return compiled.deep_copy()

    @cached_property
    def _encoder(self) -> PlainEncoder:
        return self._encoder_of()

    @cached_property
    def _plain(self) -> Tensor:
        """Tokens that stand for bytes (vocabulary,)."""
        plain = torch.tensor([bool(spelled) for spelled in self._encoder.tokens])
        plain[sorted(self.end_tokens)] = False
        return plain

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self._encoder), eos_token=sorted(self.end_tokens))

    def _compile(self, grammar: Grammar) -> Any:
        """A matcher whose first mask is computed: that builds what all masks share, and finds empty grammars."""
        from llguidance import LLMatcher, LLParserLimits

        if not self.end_tokens:
            raise InvalidRequest(f"{grammar.param}: the model has no token that ends a text", param=grammar.param)
        limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, source(grammar), limits=limits, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error = matcher.get_error()
        if error:
            raise refused(grammar, "the grammar matches no text" if error.startswith(NO_TEXT) else error)
        return matcher


def source(grammar: Grammar) -> str:
    """The grammar as llguidance takes it; raises `InvalidRequest` for one that cannot be read."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    if len(grammar.text) > MAX_TEXT:
        raise refused(grammar, f"a grammar may have {MAX_TEXT} characters, got {len(grammar.text)}")
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return LLMatcher.grammar_from_json_schema(grammar.text)
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.CONTEXT_FREE:
                return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    except (ValueError, RecursionError, LookupError, GbnfToLarkError) as error:
        raise refused(grammar, str(error)) from None


def refused(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{grammar.param}: {brief(reason)}", param=grammar.param)
