"""What is said to each kind of server. Sampling is named whole: a server would take what is missing from the model's own settings."""

from dataclasses import dataclass
from typing import Any, Literal

from ray_eagle.conversations.backends.fleet import Fault
from ray_eagle.conversations.messages import RowError
from ray_eagle.errors import ServingError

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How answers are chosen."""

    max_new_tokens: int
    temperature: float
    top_p: float


@dataclass(frozen=True)
class TextQuestion:
    """The messages so far, as a server is sent them."""

    messages: list[dict[str, Any]]
    seed: int


@dataclass(frozen=True)
class TextAnswer:
    """What the target said, as text."""

    content: str
    reasoning: str
    """Returned apart; empty without."""
    reasoning_name: str
    """The server's name for it."""
    finish: Finish
    prompt_tokens: int | None
    tokens: int
    prompt_ids: list[int] | None = None
    """What the server fed its model, where it tells."""
    ids: list[int] | None = None
    """What the target wrote, exactly, where the server tells."""


@dataclass(frozen=True)
class TokenQuestion:
    """Token ids to go on from."""

    ids: list[int]
    seed: int


@dataclass(frozen=True)
class TokenAnswer:
    """What the target wrote, exactly."""

    ids: list[int]
    finish: Finish


class OpenAI:
    """`/v1/chat/completions`, as SGLang and vLLM serve it. Both return token ids too when they are asked."""

    name = "openai"
    path = "/v1/chat/completions"
    look = "/v1/models"

    def __init__(self, sampling: Sampling, model: str | None, vocabulary: int) -> None:
        self._sampling, self._model, self._vocabulary = sampling, model, vocabulary

    def seen(self, url: str, payload: Any) -> str:
        """The model that is asked for, or the only one."""
        names = models_of(payload)
        if self._model is not None:
            if self._model not in names:
                raise ServingError(
                    f"generate: server {url}: expected the model {self._model!r}, found {', '.join(names)}. Set generate.model to "
                    "one of them, or correct generate.urls."
                )
            return self._model
        if len(names) != 1:
            raise ServingError(f"generate: server {url} has {', '.join(names)}. Set generate.model to one of them.")
        return names[0]

    def body(self, question: TextQuestion, model: str) -> dict[str, Any]:
        sampling = self._sampling
        return {
            "model": model,
            "messages": question.messages,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "n": 1,
            "stream": False,
            "return_token_ids": True,
        } | ({"seed": question.seed} if sampling.temperature else {})

    def answer(self, payload: Any) -> TextAnswer:
        choice = _the(payload, ("choices", 0), dict)
        message = _the(choice, ("message",), dict)
        finish = choice.get("finish_reason")
        if message.get("tool_calls"):
            raise RowError("the server took a part of the answer for a tool call")
        if finish not in ("stop", "length"):
            if finish in ("abort", "error", None):
                raise Fault(f"the answer broke off (finish_reason {finish!r})")
            raise RowError(f"the server ended the answer with {finish!r}")
        name = next((key for key in ("reasoning_content", "reasoning") if message.get(key)), "reasoning_content")
        content, reasoning = message.get("content") or "", message.get(name) or ""
        if not isinstance(content, str) or not isinstance(reasoning, str):
            raise Fault(f"expected texts as content and {name}, found {content!r:.60} and {reasoning!r:.60}")
        usage = payload.get("usage") or {}
        counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
        asked, made = (count if isinstance(count, int) else None for count in counts)
        # SGLang puts both into the choice, vLLM the prompt's beside it
        prompt_ids = self._known(choice, "prompt_token_ids") or self._known(payload, "prompt_token_ids")
        ids = self._known(choice, "response_token_ids") or self._known(choice, "token_ids")
        return TextAnswer(content, reasoning, name, finish, asked, made or 0, prompt_ids, ids)

    def _known(self, holder: dict[str, Any], key: str) -> list[int] | None:
        return _ids(holder, key, self._vocabulary) if holder.get(key) else None


class SGLang:
    """SGLang's own `/generate`: token ids in, token ids out."""

    name = "sglang"
    path = "/generate"
    look = "/model_info"

    def __init__(self, sampling: Sampling, stops: list[int], vocabulary: int) -> None:
        self._sampling, self._stops, self._vocabulary = sampling, stops, vocabulary

    def seen(self, url: str, payload: Any) -> str:
        return str(_the(payload, ("model_path",), str))

    def body(self, question: TokenQuestion, model: str) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_new_tokens": self._sampling.max_new_tokens,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": self._stops,
        }
        if self._sampling.temperature:
            sampling["sampling_seed"] = question.seed
        return {"input_ids": question.ids, "sampling_params": sampling, "stream": False}

    def answer(self, payload: Any) -> TokenAnswer:
        reason = _the(payload, ("meta_info", "finish_reason"), dict)
        if reason.get("type") not in ("stop", "length"):
            raise Fault(f"the answer broke off ({reason.get('message') or reason})")
        ids = _ids(payload, "output_ids", self._vocabulary)
        made = payload["meta_info"].get("completion_tokens")
        if made != len(ids):
            raise Fault(f"expected {made} token ids, found {len(ids)}")
        return TokenAnswer(ids, reason["type"])


class RayEagle:
    """The `POST /generate` of a server of this project. It decodes greedily."""

    name = "ray_eagle"
    path = "/generate"
    look = "/info"

    def __init__(self, sampling: Sampling, fingerprint: dict[str, str], vocabulary: int) -> None:
        self._sampling, self._fingerprint, self._vocabulary = sampling, fingerprint, vocabulary

    def seen(self, url: str, payload: Any) -> str:
        found = _the(payload, ("target_fingerprint",), dict)
        differ = [key for key, value in self._fingerprint.items() if found.get(key) != value]
        if differ:
            raise ServingError(
                f"generate: server {url} has another target ({payload.get('target')}): its {', '.join(differ)} differ. Set "
                "target.path to the same model, or correct generate.urls."
            )
        return str(payload.get("target"))

    def body(self, question: TokenQuestion, model: str) -> dict[str, Any]:
        return {"input_ids": question.ids, "max_new_tokens": self._sampling.max_new_tokens}

    def answer(self, payload: Any) -> TokenAnswer:
        finish = _the(payload, ("finish_reason",), str)
        if finish not in ("stop", "length"):
            raise Fault(f"unknown finish_reason {finish!r}")
        return TokenAnswer(_ids(payload, "tokens", self._vocabulary), finish)


def models_of(payload: Any) -> list[str]:
    """Names that `/v1/models` lists. Raises Fault when it lists none."""
    names = [row.get("id") for row in _the(payload, ("data",), list) if isinstance(row, dict)]
    known = [name for name in names if isinstance(name, str)]
    if not known:
        raise Fault(f"no model is listed in {payload!r:.200}")
    return known


def _ids(payload: Any, key: str, vocabulary: int) -> list[int]:
    ids = _the(payload, (key,), list)
    if not ids or not all(type(i) is int for i in ids):
        raise Fault(f"{key}: expected token ids, found {ids!r:.100}")
    if max(ids) >= vocabulary or min(ids) < 0:
        raise ServingError(
            f"generate: the server wrote token {max(ids)}, but the target has {vocabulary}: it serves another model. Correct "
            "target.path or generate.urls."
        )
    return ids


def _the(payload: Any, path: tuple[str | int, ...], kind: type) -> Any:
    """What lies at a path of keys. Raises Fault when it is not there or of another kind."""
    value = payload
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise Fault(f"expected {'.'.join(map(str, path))} in the answer, found {payload!r:.200}") from None
    if not isinstance(value, kind):
        raise Fault(f"{'.'.join(map(str, path))}: expected a {kind.__name__}, found {value!r:.200}")
    return value
