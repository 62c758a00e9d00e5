"""A server that answers as OpenAI's chat API, SGLang's own or this project's server do, and that fails as told. Stdlib alone.

    python tests/answers.py --port 8000 --fail 0.05 --stall 0.01 --cut 0.02

What it answers depends on the question alone: `said(messages)`, and `written(ids, stop)`. Half of the answers have reasoning, apart. What
contains "refuse me" is refused.
"""

import argparse
import asyncio
import hashlib
import json
import random
from typing import Any

MODEL = "the-target"
STALL_S = 3600.0


def said(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer to the messages so far."""
    asked = json.dumps([[m["role"], m["content"]] for m in messages])
    mark = hashlib.blake2b(asked.encode(), digest_size=6).hexdigest()
    answer = {"role": "assistant", "content": f"To {messages[-1]['content']!r} I say {mark}."}
    return answer | ({"reasoning_content": f"thought {mark}"} if int(mark, 16) % 2 else {})


def written(ids: list[int], stop: int) -> list[int]:
    """Letters alone, never as a tokenizer would merge them, and the end-of-turn token."""
    generator = random.Random(json.dumps(ids))
    return [generator.randrange(64, 90) for _ in range(generator.randrange(6, 24))] + [stop]


def reply(path: str, body: Any) -> Any:
    if path == "/v1/models":
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
    if path == "/model_info":
        return {"model_path": "/models/tiny", "is_generation": True}
    if path == "/v1/chat/completions":
        asked = 1 + sum(len(m["content"].encode()) + 3 for m in body["messages"])  # by `tests.tiny`'s template
        usage = {"completion_tokens": 20, "prompt_tokens": asked}
        return {"choices": [{"index": 0, "message": said(body["messages"]), "finish_reason": "stop"}], "usage": usage}
    if path == "/generate":
        stop = body["sampling_params"]["stop_token_ids"][0]
        ids = written(body["input_ids"], stop)
        reason = {"type": "stop", "matched": stop}
        return {"text": "", "output_ids": ids, "meta_info": {"finish_reason": reason, "completion_tokens": len(ids)}}
    return None


class Answers:
    def __init__(self, fail: float, stall: float, cut: float, delay_s: float, seed: int | None) -> None:
        self.fail, self.stall, self.cut, self.delay_s = fail, stall, cut, delay_s
        self.random = random.Random(seed)
        self.counts = {"answered": 0, "failed": 0, "stalled": 0, "cut": 0}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                length = next((int(h.split(":")[1]) for h in head if h.lower().startswith("content-length:")), 0)
                content = await reader.readexactly(length)
                await self.answer(method, path, json.loads(content) if content else None, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, method: str, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        if path == "/counts":
            self.send(writer, 200, json.dumps(self.counts).encode())
            return
        if "refuse me" in json.dumps(body):
            self.send(writer, 400, b'{"object": "error", "message": "I do not like it", "code": 400}')
            return
        found = reply(path, body)
        if found is None:
            self.send(writer, 404, b'{"detail": "Not Found"}')
            return
        content = json.dumps(found).encode()
        if method == "POST":
            await asyncio.sleep(self.delay_s)
            chance = self.random.random()
            if chance < self.fail:
                self.counts["failed"] += 1
                self.send(writer, 500, b'{"error": {"message": "told to fail"}}')
                return
            if chance < self.fail + self.stall:
                self.counts["stalled"] += 1
                await asyncio.sleep(STALL_S)
            if chance < self.fail + self.stall + self.cut:
                self.counts["cut"] += 1
                content = content[: self.random.randrange(len(content))]
            else:
                self.counts["answered"] += 1
        self.send(writer, 200, content)

    def send(self, writer: asyncio.StreamWriter, status: int, content: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    for name in ("fail", "stall", "cut", "delay"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    answers = Answers(args.fail, args.stall, args.cut, args.delay, args.seed)
    server = await asyncio.start_server(answers.serve, "127.0.0.1", args.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
