"""What a request holds its answer to, as one grammar. The form is checked here; the engine compiles it.

A JSON schema is enforced as it stands. What the grammar library would pass over in silence is refused here by name;
what it does not know it refuses itself.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentspec.errors import InvalidRequest, UnsupportedParameter
from agentspec.server.body import as_list, as_object
from agentspec.server.tools import CLOSE, OPEN
from agentspec.server.wire import ChatRequest, Function, Generating
from agentspec.types import Grammar, GrammarKind

MAX_PROPERTIES = 1000
"""Properties of one schema, all levels together: the time to compile grows with the square of their number."""

ONE = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

SPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
"""White space between the tokens of JSON: enough to indent, and no place for a model to stay for ever."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(asked: Generating) -> Grammar | None:
    """The grammar of a checked request; None if its answer is free.

    Raises `InvalidRequest` for options that are malformed or exclude one another.
    """
    given = [found for found in (guided(asked), structured(asked), response_format(asked)) if found is not None]
    if len(given) > 1:
        names = ", ".join(grammar.param for grammar in given)
        raise InvalidRequest(f"only one of these may be given: {names}", param=given[1].param)
    calls = calls_of(asked) if isinstance(asked, ChatRequest) else None
    if calls is None or not given:
        return calls or next(iter(given), None)
    if given[0].param != "response_format":
        raise InvalidRequest(f"{given[0].param}: cannot be combined with enforced tool calls", param=given[0].param)
    return calls


def guided(asked: Generating) -> Grammar | None:
    """vLLM's older names."""
    values = {name: getattr(asked, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
    return one_of(values, "guided_")


def structured(asked: Generating) -> Grammar | None:
    """vLLM's newer name: an object with one of json, json_object, regex, choice and grammar."""
    wanted = {name: value for name, value in asked.structured_outputs.items() if value not in (None, False)}
    known = ("json", "json_object", "regex", "choice", "grammar")
    for name in wanted:
        if name not in known:
            raise UnsupportedParameter(f"structured_outputs.{name:.40} is not supported", param="structured_outputs")
    if wanted and not set(wanted) & set(known):
        raise InvalidRequest(f"structured_outputs: needs one of {', '.join(known)}", param="structured_outputs")
    return one_of(wanted, "structured_outputs.")


def one_of(values: Mapping[str, Any], prefix: str) -> Grammar | None:
    """The grammar of the one value that is there; a choice is a list of texts, a grammar Lark or GBNF."""
    given = [name for name, value in values.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        names = ", ".join(f"{prefix}{name}" for name in given)
        raise InvalidRequest(f"only one of these may be given: {names}", param=f"{prefix}{given[1]}")
    name, value, param = given[0], values[given[0]], f"{prefix}{given[0]}"
    if name == "json_object":
        return json_grammar(ANY_OBJECT, param)
    if name == "json":
        return json_grammar(parsed(value, param), param)
    if name == "choice":
        return Grammar(GrammarKind.CONTEXT_FREE, f"start: {' | '.join(map(literal, choices(value, param)))}", param)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}: must be a string that is not empty", param=param)
    return Grammar(GrammarKind.REGEX if name == "regex" else GrammarKind.CONTEXT_FREE, value, param)


def choices(value: Any, param: str) -> Sequence[str]:
    texts = as_list(value)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{param}: must be a list of strings that is not empty", param=param)
    return texts


def parsed(schema: Any, param: str) -> Any:
    """A schema that came as JSON text or as an object."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param}: is not JSON", param=param) from None


def response_format(asked: Generating) -> Grammar | None:
    """OpenAI's option: text, json_object (with a schema too, as llama.cpp takes it) or json_schema."""
    schema = response_schema(asked)
    return None if schema is None else json_grammar(schema, "response_format")


def response_schema(asked: Generating) -> Any:
    """The schema that `response_format` asks for; None for text."""
    wanted = asked.response_format
    kind = wanted.get("type", "text" if not wanted else None)
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT if wanted.get("schema") is None else wanted["schema"]
    if kind == "json_schema":
        schema = (as_object(wanted.get("json_schema")) or {}).get("schema")
        if schema is None:
            raise InvalidRequest("response_format: json_schema needs a schema in json_schema", param="response_format")
        return schema
    raise UnsupportedParameter(
        f"response_format: knows text, json_object and json_schema, got {kind!r:.60}", param="response_format"
    )


def schema_of(asked: Generating, grammar: Grammar | None) -> Any:
    """The JSON schema of a checked request's answer; None where it is free or anything but JSON."""
    if grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA:
        return json.loads(grammar.text)
    return response_schema(asked)


def json_grammar(schema: Any, param: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(schema, param), param)


def schema_text(schema: Any, param: str) -> str:
    """JSON text of a checked schema with our bound on white space."""
    return json.dumps({"x-guidance": SPACE, **checked(schema, param)}, ensure_ascii=False)


def checked(schema: Any, param: str) -> dict[str, Any]:
    """A schema without what would be ignored in silence; raises `InvalidRequest` that names it."""
    fields = as_object(schema)
    if fields is None:
        raise InvalidRequest(f"{param}: a schema must be an object", param=param)
    properties = 0
    for part in parts(fields):
        refuse_ignored(part, param)
        properties += len(as_object(part.get("properties")) or ())
    if properties > MAX_PROPERTIES:
        raise InvalidRequest(f"{param}: a schema may have {MAX_PROPERTIES} properties, got {properties}", param=param)
    return fields


def parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and the schemas in it."""
    pending: list[Any] = [schema]
    while pending:
        part = as_object(pending.pop())
        if part is None:
            continue
        yield part
        pending += [part[name] for name in ONE if name in part]
        for name in SEVERAL:
            pending += as_list(part.get(name)) or ()
        for name in NAMED:
            pending += (as_object(part.get(name)) or {}).values()


def refuse_ignored(part: Mapping[str, Any], param: str) -> None:
    """Raises `InvalidRequest` for keywords that the grammar library reads, but not as JSON Schema does."""
    for name in ("x-guidance", "additionalItems"):
        if name in part:
            raise InvalidRequest(f"{param}: the schema's {name} is not supported", param=param)
    if isinstance(part.get("items"), list):
        raise InvalidRequest(f"{param}: items as a list is not supported; use prefixItems", param=param)
    least = part.get("minProperties")
    named = len(as_list(part.get("required")) or ())
    closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if isinstance(least, int) and least > named + 1 and not closed:
        raise InvalidRequest(
            f"{param}: minProperties is supported up to one more than what is required, got {least}", param=param
        )


def calls_of(asked: ChatRequest) -> Grammar | None:
    """The grammar of tool calls where something about them is enforced: that there is one, which one, not more than
    one, or that arguments follow a strict schema. With a response format, the answer is a call or of that format."""
    functions = [tool.function for tool in asked.tools]
    if not functions or asked.tool_choice == "none":
        return None
    choice = asked.tool_choice
    enforced = choice not in (None, "auto")
    if choice not in (None, "auto", "required"):
        name = choice["function"]["name"]
        functions = [function for function in functions if function.name == name]
    single = not asked.parallel_tool_calls or choice not in (None, "auto", "required")
    if not enforced and not single and not any(function.strict for function in functions):
        return with_answer(asked, functions)
    return lark(functions, None if enforced else response_schema(asked), enforced=enforced, single=single)


def with_answer(asked: ChatRequest, functions: Sequence[Function]) -> Grammar | None:
    """Free calls beside an answer of a response format; None without such a format."""
    schema = response_schema(asked)
    return None if schema is None else lark(functions, schema, enforced=False, single=False)


def lark(functions: Sequence[Function], answer: Any, *, enforced: bool, single: bool) -> Grammar:
    """A grammar of calls in the markup that `agentspec.server.tools` reads."""
    rules = [f"call_{index}: {call_rule(function, enforced)}" for index, function in enumerate(functions)]
    calls = " | ".join(f"call_{index}" for index in range(len(functions)))
    body = f'"\\n" ({calls}) {literal(chr(10) + CLOSE)}'
    if enforced or answer is not None:
        more = "" if single else r' ("\n" call)*'
        alternative = "" if answer is None else " | answer"
        rules += [f"start: call{more}{alternative}", f"call: {literal(OPEN)} {body}"]
        if answer is not None:
            rules.append(f"answer: %json {schema_text(answer, 'response_format')}")
    else:
        rules += ["start: text | call_in_text" if single else "start: call_in_text* text", "text: TEXT"]
        rules += [r"TEXT: /(.|\n)*/", f"opening[lazy]: TEXT {literal(OPEN)}", f"call_in_text: opening {body}"]
    return Grammar(GrammarKind.CONTEXT_FREE, "\n".join(["%llguidance {}", *rules]) + "\n", "tools")


def call_rule(function: Function, enforced: bool) -> str:
    """A call of one function: its arguments follow its schema if it is strict, or if the call is enforced and the
    function does not say that it is not strict; otherwise they are any object."""
    begin = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": '
    follows = function.strict or (enforced and function.strict is None)
    schema = arguments_schema(function) if follows else ANY_OBJECT
    return f"{literal(begin)} %json {schema_text(schema, 'tools')} {literal('}')}"


def arguments_schema(function: Function) -> Mapping[str, Any]:
    """The schema of a function's arguments, which are an object in any case."""
    if function.parameters is None:
        return NO_ARGUMENTS
    if function.parameters.get("type", "object") != "object":
        raise InvalidRequest(f"tools: the parameters of {function.name!r:.80} must be of type object", param="tools")
    return {**function.parameters, "type": "object"}


def literal(text: str) -> str:
    """A text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)
