"""Rows of the shapes people have, as one: a list of chat messages.

A message is `{"role", "content"}` and, where the row has them, `reasoning_content`, `tool_calls`, `tool_call_id` and `name`;
roles are `system`, `developer`, `user`, `assistant` and `tool`. What cannot be read is a RowError whose text is the reason in
rejected.jsonl. Pure.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ray_eagle.errors import InputError

Shape = Literal["messages", "sharegpt", "prompt", "turns", "text"]
Reasoning = Literal["keep", "drop", "last"]
Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
IDS = ("id", "source_id", "conversation_id", "prompt_id", "uuid")
ASKED = ("prompt", "instruction", "question", "query")
ANSWERED = ("output", "response", "completion", "answer")


class RowError(Exception):
    """A row that cannot be used; the text says why."""


@dataclass(frozen=True)
class Row:
    """One input row, read."""

    id: str
    """The row's own, else a hash of its content."""
    category: str
    messages: list[Message]
    tools: list[Any] = field(default_factory=list)

    @property
    def user_text(self) -> str:
        """All that the user says: what near-duplicates are judged by."""
        return " ".join(m["content"] for m in self.messages if m["role"] == "user")


def detect_shape(rows: list[Any], where: str) -> Shape:
    """The shape of the first row that has one. Raises InputError when none does."""
    for row in rows:
        if shape := _shape_of(row):
            return shape
    keys = next((sorted(row) for row in rows if isinstance(row, dict)), "no JSON object")
    raise InputError(
        f"{where}: expected rows with messages, conversations, turns, text, or one of {', '.join(ASKED)}; found {keys}. Rename a "
        f"column, or set generate.shape to one of {', '.join(get_args(Shape))}."
    )


def _shape_of(row: Any) -> Shape | None:
    if isinstance(row, str):
        return "text"
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("messages"), list | str):
        return "messages"
    if isinstance(row.get("conversations"), list | str):
        return "sharegpt"
    if isinstance(row.get("turns"), list):
        return "turns"
    if any(key in row for key in ASKED):
        return "prompt"
    return "text" if "text" in row else None


def read_row(raw: Any, shape: Shape, marks: tuple[str, str]) -> Row:
    """A row in a shape as messages. `marks` enclose reasoning that stands inside an answer: it is taken apart here.

    Raises RowError with the reason.
    """
    if not isinstance(raw, dict):
        if not (shape == "text" and isinstance(raw, str)):
            raise RowError(f"expected a JSON object, found {type(raw).__name__}")
        raw = {"text": raw}
    messages = [checked(message, marks) for message in _READERS[shape](raw)]
    tools = _tools(raw)
    try:
        json.dumps(
            [messages, tools, [raw.get(key) for key in IDS if isinstance(raw.get(key), str)]], ensure_ascii=False
        ).encode()
    except UnicodeEncodeError:
        raise RowError("the text holds half a character (a lone surrogate)") from None
    except (TypeError, ValueError) as error:
        raise RowError(f"it holds a value that JSON does not know ({error})") from None
    first = next((m for m in messages if m["role"] not in ("system", "developer")), None)
    if first is None:
        raise RowError("no message of a user")
    if first["role"] != "user":
        raise RowError(f"the first message is of the {first['role']}, expected the user's")
    if not any(m["role"] == "user" and m["content"].strip() for m in messages):
        raise RowError("the user's messages are empty")
    name = own_id(raw) or content_id(messages, tools)
    return Row(name, str(raw.get("category") or "none").encode(errors="replace").decode(), messages, tools)


def own_id(raw: Any) -> str:
    """The id that a row carries, whatever else is in it; empty for none."""
    keys = IDS if isinstance(raw, dict) else ()
    found = next((str(raw[key]) for key in keys if isinstance(raw.get(key), str | int) and raw[key] != ""), "")
    return found.encode(errors="replace").decode()


def content_id(messages: list[Message], tools: list[Any]) -> str:
    """16 hex digits of the BLAKE2 hash of the content."""
    text = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _messages(raw: dict[str, Any]) -> list[Message]:
    system = raw.get("system") or raw.get("system_prompt")
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    return before + [_openai(m) for m in _list(raw.get("messages"), "messages")]


def _openai(message: Any) -> Message:
    if not isinstance(message, dict):
        raise RowError(f"expected a message with a role, found {type(message).__name__}")
    if "role" not in message and "from" in message:
        return _sharegpt_message(message)
    return message


def _sharegpt(raw: dict[str, Any]) -> list[Message]:
    system = raw.get("system") or raw.get("system_prompt")
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    return before + [_openai(m) for m in _list(raw.get("conversations"), "conversations")]


def _sharegpt_message(message: Message) -> Message:
    speaker, value = message["from"], message.get("value")
    extra = {key: message[key] for key in (*REASONING, "name", "tool_call_id", "tool_calls") if message.get(key)}
    if speaker == "function_call":
        call = _json(value, "function_call")
        calls = call if isinstance(call, list) else [call]
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}
    return {"role": speaker, "content": value, **extra}


def _prompt(raw: dict[str, Any]) -> list[Message]:
    key = next((key for key in ASKED if raw.get(key)), None)
    if key is None:
        raise RowError(f"expected one of {', '.join(ASKED)}, found none")
    asked = raw[key]
    if isinstance(asked, list):
        messages = [_openai(m) for m in asked]
    elif isinstance(asked, str):
        more = raw.get("input")
        both = f"{asked}\n\n{more}" if isinstance(more, str) and more.strip() else asked
        messages = [{"role": "user", "content": both}]
    else:
        raise RowError(f"{key}: expected text, found {type(asked).__name__}")
    system = raw.get("system") or raw.get("system_prompt")
    if isinstance(system, str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    answer_key = next((key for key in ANSWERED if raw.get(key)), None)
    answer = raw[answer_key] if answer_key else None
    if isinstance(answer, list):
        return messages + [_openai(m) for m in answer]
    if answer is not None:
        extra = {key: raw[key] for key in REASONING if isinstance(raw.get(key), str)}
        messages.append({"role": "assistant", "content": answer, **extra})
    return messages


def _turns(raw: dict[str, Any]) -> list[Message]:
    turns = _list(raw.get("turns"), "turns")
    for number, turn in enumerate(turns, 1):
        if not (isinstance(turn, str) and turn.strip()):
            raise RowError(f"turn {number}: expected text, found {turn!r:.60}")
    return [{"role": "user", "content": turn} for turn in turns]


def _text(raw: dict[str, Any]) -> list[Message]:
    return [{"role": "user", "content": raw.get("text")}]


_READERS: dict[str, Callable[[dict[str, Any]], list[Message]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt": _prompt,
    "turns": _turns,
    "text": _text,
}


def checked(message: Message, marks: tuple[str, str]) -> Message:
    """Known keys alone, a known role, content as one text, reasoning in `reasoning_content`."""
    said = message.get("role")
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise RowError(f"unknown role {said!r}")
    clean: Message = {"role": role, "content": _content(message.get("content"))}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            clean["tool_calls"] = [_call(call) for call in _list(calls, "tool_calls")]
        reasoning = next((message[key] for key in REASONING if message.get(key)), None)
        if reasoning is None:
            reasoning, clean["content"] = take_apart(clean["content"], marks)
        elif not isinstance(reasoning, str):
            raise RowError(f"reasoning: expected text, found {type(reasoning).__name__}")
        if reasoning:
            clean["reasoning_content"] = reasoning
        if not (clean["content"].strip() or clean.get("tool_calls") or reasoning):
            raise RowError("an answer of the assistant is empty")
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str):
            clean[key] = message[key]
    return clean


def keep_reasoning(messages: list[Message], reasoning: Reasoning) -> list[Message]:
    """With `last`, reasoning stays in the answers after the last user message; with `drop`, nowhere."""
    first = len(messages)
    if reasoning == "keep":
        first = 0
    elif reasoning == "last":
        first = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    return [
        m if i >= first else {key: value for key, value in m.items() if key != "reasoning_content"}
        for i, m in enumerate(messages)
    ]


def take_apart(content: str, marks: tuple[str, str]) -> tuple[str, str]:
    """Reasoning and answer of a text that begins with marked reasoning; no reasoning otherwise."""
    begin, end = (mark.strip() for mark in marks)
    if not (begin and end and content.lstrip().startswith(begin) and end in content):
        return "", content
    reasoning, answer = content.lstrip().removeprefix(begin).split(end, 1)
    return reasoning.strip("\n"), answer.lstrip("\n")


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"content: expected text or parts, found {type(content).__name__}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError(f"content part of type {kind!r}: only text can be drafted")
    return "".join(texts)


def _call(call: Any) -> dict[str, Any]:
    """A tool call as OpenAI writes it, its arguments as an object: templates write them out themselves."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise RowError("a tool call without a function's name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", "arguments of a tool call")
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def _tools(raw: dict[str, Any]) -> list[Any]:
    tools = raw.get("tools") or raw.get("functions") or []
    tools = _list(tools, "tools")
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowError("tools: expected JSON objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _list(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):  # tables often hold lists as JSON texts
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not (isinstance(value, list) and (value or name == "tools")):
        raise RowError(f"{name}: expected a list that is not empty, found {value!r:.60}")
    return value


def _json(text: Any, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise RowError(f"{name}: expected JSON, found {text!r:.60}") from None
