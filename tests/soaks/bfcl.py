"""The prompts of the Berkeley function calling leaderboard, through templates and parsers:

    pip download --no-deps bfcl-eval && python -m tests.soaks.bfcl --wheel bfcl_eval-*.whl

Every prompt with its functions is rendered by every family's template. Its right answers are
written as a model of the family would write them, cut at random, and read back: the same calls must
come out. A grammar that forces a call of the functions must allow that text. Says how many did.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from manyroots.errors import RequestError
from manyroots.grammar.cache import GrammarCache
from manyroots.grammar.vocabulary import Vocabulary
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.text.chat import ChatTemplate
from manyroots.text.tools import ToolUse, check_tools
from tests.helpers.family_templates import BEGIN, END, TEMPLATES
from tests.unit.text.recorded_answers import joined, pieces

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "hashtable": "object"}
_JSON_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """One prompt, its functions, and a right answer where there is one."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    calls: list[Call]


def records(wheel: str) -> Iterator[Record]:
    """All prompts of a wheel of `bfcl-eval`."""
    with zipfile.ZipFile(wheel) as files:
        docs = _function_docs(files)
        for path in sorted(files.namelist()):
            folder, _, name = path.rpartition("/")
            is_data = folder.endswith("bfcl_eval/data") and name.startswith("BFCL_")
            if not is_data or "format_sensitivity" in name:
                continue
            answers = {}
            if f"{folder}/possible_answer/{name}" in files.namelist():
                lines = _lines(files, f"{folder}/possible_answer/{name}")
                answers = {line["id"]: line["ground_truth"] for line in lines}
            for line in _lines(files, path):
                if "question" in line:
                    yield _record(line, docs, answers.get(line["id"]))


def _lines(files: zipfile.ZipFile, path: str) -> list[Any]:
    text = files.read(path).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _function_docs(files: zipfile.ZipFile) -> dict[str, list[Any]]:
    """Of prompts that name classes instead of functions."""
    found = {}
    for path in files.namelist():
        if "/multi_turn_func_doc/" in path and path.endswith(".json"):
            name = path.rpartition("/")[2].removesuffix(".json").replace("_", "")
            found[name] = _lines(files, path)
    return found


def _record(line: dict[str, Any], docs: dict[str, list[Any]], truth: Any) -> Record:
    functions = line.get("function") or [
        function
        for name in line.get("involved_classes", ())
        for function in docs.get(name.lower(), ())
    ]
    unique = {function["name"]: function for function in functions}
    tools = [{"type": "function", "function": _function(f)} for f in unique.values()]
    question = line["question"]
    messages = question if isinstance(question[0], dict) else [m for turn in question for m in turn]
    return Record(line["id"], messages, tools, _calls(truth))


def _function(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": _schema(function.get("parameters") or {"type": "object"}),
    }


def _schema(schema: Any) -> Any:
    """Their types as JSON schema's."""
    if isinstance(schema, list):
        return [_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for name, value in schema.items():
        if name == "properties":
            made[name] = {key: _schema(item) for key, item in value.items()}
        elif name == "type" and isinstance(value, str):
            kind = _TYPES.get(value.lower(), value.lower())
            if kind in _JSON_TYPES:
                made[name] = kind
        elif name in ("items", "required", "enum", "description", "additionalProperties"):
            made[name] = _schema(value) if isinstance(value, dict | list) else value
    return made


def _calls(truth: Any) -> list[Call]:
    """The first right value of each argument."""
    if not isinstance(truth, list) or not all(isinstance(call, dict) for call in truth):
        return []
    calls = []
    for call in truth:
        for name, arguments in call.items():
            if not isinstance(arguments, dict):
                return []
            given = {key: values[0] for key, values in arguments.items() if values}
            calls.append((name, _plain(given)))
    return calls


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def messages_of(calls: list[Call]) -> list[dict[str, Any]]:
    """An assistant that calls, as history."""
    made = [
        {"id": f"call{i:05}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": made}]


def check(record: Record, template: ChatTemplate, grammars: GrammarCache | None) -> Counter[str]:
    """Render, write, read back; raises AssertionError where it is not the same."""
    use = check_tools(record.tools, None)
    prompt = template.render(record.messages, use=use)
    assert not record.tools or record.tools[0]["function"]["name"] in prompt
    counts = Counter({"rendered": 1})
    if not record.calls or not record.tools:
        return counts
    history = template.render(
        record.messages + messages_of(record.calls), use=use, add_generation_prompt=False
    )
    text = history.rpartition(BEGIN)[2].removesuffix(END)
    output = template.format.output(use, prompt=prompt)
    events = [e for part in pieces(text, random.Random(record.name)) for e in output.push(part)]
    answer = joined(events + output.finish())
    read = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    assert answer.content is None, answer.content
    assert len(read) == len(record.calls)
    assert all(map(_is_same, read, record.calls)), (read, record.calls)
    counts["read back"] += 1
    if grammars is not None:
        counts[_forced(template, check_tools(record.tools, "required"), text, grammars)] += 1
    return counts


def _is_same(read: Call, written: Call) -> bool:
    """Some answers are of other types than their schema says, which decides where a format writes
    plain text."""
    same_names = read[0] == written[0] and read[1].keys() == written[1].keys()
    return same_names and all(
        value == read[1][key]
        or (isinstance(read[1][key], str) and read[1][key] == json.dumps(value))
        for key, value in written[1].items()
    )


def _forced(template: ChatTemplate, use: ToolUse, text: str, grammars: GrammarCache) -> str:
    """Whether the grammar of a forced call allows this one. Answers are not always what their own
    schema says, and a grammar has its own order of arguments: then it does not."""
    wanted = StructuredOutputsParams(grammar=template.format.tools.grammar(use, json.dumps))
    try:
        matcher = grammars.compile(wanted).start()
    except RequestError as error:
        return f"no grammar: {str(error)[:100]}"
    tokens = list(text.strip().removesuffix("<|call|>").encode())
    allowed = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    return "allowed" if allowed else "not allowed"


def bytes_vocabulary() -> Vocabulary:
    pieces = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    return Vocabulary(pieces, (256,), (256,), lambda text: list(text.encode()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", required=True)
    parser.add_argument("--every", type=int, default=1, help="only every so many prompts")
    parser.add_argument("--grammars", action="store_true", help="force calls, too; takes longer")
    options = parser.parse_args()
    chosen = list(records(options.wheel))[:: options.every]
    grammars = GrammarCache(bytes_vocabulary) if options.grammars else None
    failed = 0
    for name, source in TEMPLATES.items():
        template = ChatTemplate(source, {})
        counts: Counter[str] = Counter()
        for record in chosen:
            try:
                counts += check(record, template, grammars)
            except Exception as error:  # whatever it is, it is to be reported
                failed += 1
                counts["failed"] += 1
                print(f"{name}, {record.name}: {type(error).__name__}: {str(error)[:300]}")
        print(f"{name}: {dict(counts)}", flush=True)
    print(f"{len(chosen)} prompts, {len(TEMPLATES)} templates, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
