"""Two clients of the server with the same methods: by deployment handle inside the cluster, over HTTP from anywhere."""

from types import TracebackType
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ray_eagle.errors import EagleError, InputError, ServingError
from ray_eagle.serving.engine import EngineFacts, Speculation
from ray_eagle.serving.messages import (
    ConfigureRequest,
    DecodeReply,
    DecodeRequest,
    GenerateReply,
    GenerateRequest,
    Health,
    Info,
)

Reply = TypeVar("Reply", bound=BaseModel)


class HandleClient:
    """Talks to the replica directly; `url` is where the same app answers over HTTP."""

    def __init__(self, handle: DeploymentHandle, url: str) -> None:
        self.url = url
        self._handle = handle

    def generate(self, **request: Any) -> GenerateReply:
        """Fields of GenerateRequest. Raises InputError for a bad request, ServingError when the replica is gone."""
        return self._ask("generate", _request(GenerateRequest, request))

    def configure(self, speculation: Speculation | None) -> EngineFacts:
        """Decode so from now on. Raises ConfigError for what the engine cannot do, ServingError."""
        return self._ask("configure", ConfigureRequest(speculation=speculation))

    def decode(self, **request: Any) -> list[GenerateReply]:
        """Fields of DecodeRequest. Raises as `generate`."""
        return self._ask("decode", _request(DecodeRequest, request)).replies

    def engine(self) -> EngineFacts:
        return self._ask("engine")

    def info(self) -> Info:
        return self._ask("info")

    def health(self) -> Health:
        return self._ask("health")

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._handle, method).remote(*arguments).result()
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EagleError):
                raise cause from None
            raise ServingError(f"server: {method} failed in the replica: {cause or error}") from error
        except (RayError, RayServeException) as error:
            raise ServingError(
                f"server: the replica died or cannot be reached during {method}: {error}. Look into its log "
                "(ray logs), and check its memory."
            ) from error


class HttpClient:
    """Talks to a server at `url`, which may run anywhere. A context manager: it holds a connection."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # an answer takes as long as it takes; a server that is not there is known at once
        self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=10))

    def __enter__(self) -> "HttpClient":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def generate(self, **request: Any) -> GenerateReply:
        """Fields of GenerateRequest. Raises InputError for a bad request, ServingError when the server fails."""
        return self._ask(GenerateReply, "POST", "generate", _request(GenerateRequest, request).model_dump())

    def configure(self, speculation: Speculation | None) -> EngineFacts:
        """Decode so from now on. Raises InputError for what the engine cannot do, ServingError."""
        return self._ask(EngineFacts, "POST", "configure", ConfigureRequest(speculation=speculation).model_dump())

    def decode(self, **request: Any) -> list[GenerateReply]:
        """Fields of DecodeRequest. Raises as `generate`."""
        return self._ask(DecodeReply, "POST", "decode", _request(DecodeRequest, request).model_dump()).replies

    def engine(self) -> EngineFacts:
        return self._ask(EngineFacts, "GET", "engine")

    def info(self) -> Info:
        return self._ask(Info, "GET", "info")

    def health(self) -> Health:
        return self._ask(Health, "GET", "health")

    def _ask(self, kind: type[Reply], method: str, path: str, body: Any = None) -> Reply:
        url = f"{self.url}/{path}"
        try:
            response = self._http.request(method, url, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServingError(
                f"server {url}: cannot be reached ({error}). Check probe.url and that it runs."
            ) from error
        if response.status_code >= 400:
            message = f"server {url}: {response.status_code}: {_message(response)}"
            raise InputError(message) if response.status_code in (400, 422) else ServingError(message)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise ServingError(
                f"server {url}: expected a {kind.__name__}, found {response.text[:200]!r} ({error.error_count()} "
                "faults). Is it a ray_eagle server of this version?"
            ) from None


def _request(kind: type[Reply], fields: dict[str, Any]) -> Reply:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'request'}: {e['msg']}" for e in error.errors())
        raise InputError(f"generate: {faults}.") from None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500]
