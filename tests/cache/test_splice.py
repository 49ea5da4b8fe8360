"""Splicing: nothing that a prompt says changes, and what the engine holds comes back token by token."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import digest_of
from agentspec.cache.index import as_tokens
from agentspec.cache.replies import OVERHEAD, Replies, Reply
from agentspec.cache.splice import Return, Spliced, Splicer
from agentspec.types import Scope, Trajectory

PIECES = [b"", b"", b"a", b"b", b" ", b"\n", b"ab", b"ba", b"\n\n", b"aba", b"b ", "ü".encode(), b"\xc3", b"\xbc"]
PIECES += [b"\xef", b"\xbf", b"\xbd"]
START, END = 0, 1
SPLICER = Splicer(PIECES, len(PIECES))
SCOPE = Scope("tenant", "model")
RUN = Trajectory("run", SCOPE)


def tokenize(text: bytes) -> list[int]:
    """The longest piece first."""
    found, at = list[int](), 0
    while at < len(text):
        token = max(range(2, len(PIECES)), key=lambda one: len(PIECES[one]) if text.startswith(PIECES[one], at) else 0)
        found.append(token)
        at += len(PIECES[token])
    return found


def said(tokens: Sequence[int]) -> bytes:
    return b"".join(PIECES[token] for token in tokens)


def shown(tokens: Sequence[int]) -> bytes:
    """What a client gets of tokens."""
    return said(tokens).decode(errors="replace").encode()


def render(turns: Sequence[tuple[bytes, bytes]], last: bytes) -> Int32s:
    """Turns of a user and an answer, and the user's last one."""
    tokens = list[int]()
    for asked, answer in turns:
        tokens += [START, *tokenize(b"b\n" + asked), END, START, *tokenize(b"a\n" + answer), END]
    return as_tokens([*tokens, START, *tokenize(b"b\n" + last), END, START, *tokenize(b"a\n")])


def keep(replies: Replies, prompt: Int32s, answer: Sequence[int], size: int | None = None, **fields: bool) -> None:
    size = len(shown(answer)) if size is None else size
    before, reply = SPLICER.reply(prompt, as_tokens(answer), size, **fields)
    replies.add(RUN, before, reply)


def spliced(replies: Replies, prompt: Int32s, trajectory: Trajectory = RUN) -> Spliced:
    return SPLICER.splice(prompt, replies.known(trajectory))


texts = st.lists(st.integers(2, len(PIECES) - 1), max_size=12)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=5), st.integers(0, 2**32))
def test_a_conversation_is_what_the_engine_holds_and_says_what_it_said(
    turns: list[tuple[list[int], list[int], bool]], seed: int
) -> None:
    dice = random.Random(seed)
    replies, told, held = Replies(10**9), list[tuple[bytes, bytes]](), list[int]()
    for asked, answer, edited in turns:
        rendered = render(told, shown(asked))
        result = spliced(replies, rendered)
        prompt = result.tokens
        assert said(prompt.tolist()) == said(rendered.tolist())
        assert prompt[prompt < 2].tolist() == rendered[rendered < 2].tolist()
        assert prompt[: len(held)].tolist() == held
        keep(replies, prompt, [*answer, END])
        text = shown(answer)
        honest = not edited and text == said(answer)
        held = [*prompt.tolist(), *answer, END] if honest else []
        if edited:
            at = dice.randrange(len(text) + 1)
            text = (text[:at] + b"a" + text[at:]).decode(errors="replace").encode()
        told.append((shown(asked), text))


def test_a_line_break_that_the_tokenizer_joins_with_the_prompt_s_is_parted_again() -> None:
    replies, prompt = Replies(10**6), render([], b"a")
    keep(replies, prompt, [5, 2, END])
    rendered = render([(b"a", b"\na")], b"b")
    result = spliced(replies, rendered)
    assert 8 in rendered and 8 not in result.tokens
    assert result.tokens[: prompt.size + 3].tolist() == [*prompt.tolist(), 5, 2, END]
    assert (result.returns, result.answers) == ([Return.SPLICED], 1)
    assert result.first == prompt.size - 1


@pytest.mark.parametrize(
    ("answer", "came", "how"),
    [
        ([2, 3], b"ab", Return.SPLICED),
        ([6], b"ab", Return.IDENTICAL),
        ([], b"", Return.IDENTICAL),
        ([4, 2, 3, 5], b"ab", Return.SPACE),
        ([2, 4, 3], b"a\n\nb", Return.SPACE),
        ([2, 3, 5, 11, 2], "ü".encode(), Return.PART),
        ([2, 3], b"", Return.PART),
        ([2, 3], b"aba", Return.OTHER),
        ([2, 3], b"abb", Return.OTHER),
        ([2, 3], b"aa", Return.OTHER),
        ([2, 0, 3], b"ab", Return.OTHER),
        ([2, 12], "a\N{REPLACEMENT CHARACTER}".encode(), Return.OTHER),
    ],
)
def test_an_answer_is_put_in_only_where_it_is_the_same_and_how_it_came_back_is_told_once(
    answer: list[int], came: bytes, how: Return
) -> None:
    replies, prompt = Replies(10**6), render([], b"b")
    keep(replies, prompt, [*answer, END])
    rendered = as_tokens([*prompt.tolist(), *tokenize(came), END, START])
    result = spliced(replies, rendered)
    assert result.returns == [how]
    generated = [*prompt.tolist(), *answer, END, START]
    assert result.tokens.tolist() == (generated if how is Return.SPLICED else rendered.tolist())
    assert spliced(replies, rendered).returns == []


def test_the_same_prompt_again_and_another_role_are_no_returns() -> None:
    replies, prompt = Replies(10**6), render([], b"b")
    keep(replies, prompt, [2, 3, END])
    for rendered in (prompt, as_tokens([*prompt.tolist()[:-2], *tokenize(b"b\nab"), END, START])):
        result = spliced(replies, rendered)
        assert result.tokens.tolist() == rendered.tolist()
        assert result.returns == [] and result.first is None


def test_a_stop_string_may_end_inside_a_token() -> None:
    replies, prompt = Replies(10**6), render([], b"b")
    keep(replies, prompt, [2, 3, 4, 6], size=4)
    result = spliced(replies, render([(b"b", b"ab a")], b"b"))
    assert result.tokens[prompt.size : prompt.size + 5].tolist() == [2, 3, 4, 2, END]
    assert result.returns == [Return.SPLICED]


@pytest.mark.parametrize(("came", "put_in"), [(b"ab", True), (b"ab ", True), (b"", False), (b"ab a", False)])
def test_of_an_answer_that_was_broken_off_any_beginning_may_come_back(came: bytes, put_in: bool) -> None:
    replies, prompt = Replies(10**6), render([], b"b")
    keep(replies, prompt, [2, 3, 4, 2, 3], size=3, broken_off=True)
    rendered = render([(b"b", came)], b"b")
    assert (spliced(replies, rendered).answers == 1) == put_in


def test_of_several_answers_to_one_prompt_the_one_that_came_back_is_put_in() -> None:
    replies, prompt = Replies(10**6), render([], b"b")
    for answer in ([2, 3, END], [3, 2, END], [2, 3, 2, END]):
        keep(replies, prompt, answer)
    for answer in ([2, 3], [3, 2], [2, 3, 2]):
        result = spliced(replies, render([(b"b", said(answer))], b"b"))
        assert result.tokens[prompt.size : prompt.size + len(answer)].tolist() == answer
        assert result.returns == [Return.SPLICED]


def test_one_that_is_identical_goes_before_others() -> None:
    replies, prompt = Replies(10**6), render([], b"b")
    keep(replies, prompt, [2, 3, END])
    keep(replies, prompt, [6, END])
    assert spliced(replies, render([(b"b", b"ab")], b"b")).answers == 0


def test_an_answer_counts_only_behind_the_very_tokens_that_it_followed() -> None:
    replies = Replies(10**6)
    keep(replies, render([], b"b"), [2, 3, END])
    result = spliced(replies, render([(b"a", b"ab")], b"b"))
    assert result.answers == 0 and result.returns == []


def test_sub_agents_see_the_answers_above_them_and_nobody_else_does() -> None:
    replies, prompt = Replies(10**6), render([], b"b")
    keep(replies, prompt, [2, 3, END])
    child, grandchild = replace(RUN, id="child", parent="run"), replace(RUN, id="grandchild", parent="child")
    rendered = render([(b"b", b"ab")], b"b")
    for one in (child, grandchild):
        replies.open(one)
        assert spliced(replies, rendered, one).answers == 1
    for stranger in (replace(RUN, id="other"), replace(RUN, scope=Scope("thief", "model"))):
        replies.open(stranger)
        assert spliced(replies, rendered, stranger).answers == 0
    thief = Trajectory("child", Scope("thief", "model"), "run")
    replies.open(thief)
    assert spliced(replies, rendered, thief).answers == 0


def test_parents_that_name_each_other_end() -> None:
    replies = Replies(10**6)
    replies.open(Trajectory("a", SCOPE, "b"))
    replies.open(Trajectory("b", SCOPE, "a"))
    assert len(replies.known(Trajectory("a", SCOPE))) <= 8


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 40)), max_size=60), st.integers(0, 6000))
def test_bytes_are_those_of_what_is_kept_and_within_the_limit(added: list[tuple[int, int, int]], limit: int) -> None:
    replies = Replies(limit)
    for number, place, size in added:
        trajectory = replace(RUN, id=f"run-{number}")
        replies.add(trajectory, bytes([place]), Reply(np.zeros(size, np.int32), 0, size))
        assert replies.bytes <= limit
        kept = [Trajectory(f"run-{one}", SCOPE) for one in range(6)]
        assert replies.bytes == sum(
            OVERHEAD + sum(reply.bytes for group in replies.known(one)[0].values() for reply in group)
            for one in kept
            if one in replies
        )
    for number in range(6):
        replies.forget(SCOPE, {digest_of(replace(RUN, id=f"run-{number}"))})
    assert replies.bytes == 0


def test_the_least_recently_used_leave_first_and_an_answer_is_kept_once() -> None:
    one = Reply(np.zeros(10, np.int32), 0, 10)
    replies = Replies(2 * (OVERHEAD + one.bytes))
    for name in ("a", "b", "a", "c"):
        replies.add(replace(RUN, id=name), b"place", replace(one))
    assert [name for name in "abc" if replies.bytes_of(replace(RUN, id=name))] == ["a", "c"]


def test_deleting_takes_one_trajectory_of_one_scope() -> None:
    replies = Replies(10**6)
    theirs = Trajectory("run", Scope("other", "model"))
    for trajectory in (RUN, theirs):
        replies.add(trajectory, b"place", Reply(np.zeros(10, np.int32), 0, 10))
    assert replies.forget(SCOPE, {digest_of(RUN)})
    assert not replies.forget(SCOPE, {digest_of(RUN)})
    assert not replies.bytes_of(RUN) and replies.bytes_of(theirs)


def test_a_stored_conversation_gives_its_answers_back() -> None:
    replies, prompt = Replies(10**6), render([], b"b")
    document = as_tokens([*prompt.tolist(), 5, 2, 3, END, *tokenize(b"\n"), START])
    found = list(SPLICER.stored(document, lambda text: tokenize(text.encode())))
    assert len(found) == 1
    replies.add(RUN, *found[0])
    result = spliced(replies, render([(b"b", b"\nab")], b"b"))
    assert result.tokens[: prompt.size + 4].tolist() == [*prompt.tolist(), 5, 2, 3, END]
    assert result.answers == 1 and result.returns == []


def test_the_last_answer_of_a_stored_conversation_may_lack_its_end() -> None:
    replies, prompt = Replies(10**6), render([], b"b")
    for before, reply in SPLICER.stored(as_tokens([*prompt.tolist(), 2, 3]), lambda text: tokenize(text.encode())):
        replies.add(RUN, before, reply)
    assert spliced(replies, render([(b"b", b"ab")], b"b")).answers == 1
