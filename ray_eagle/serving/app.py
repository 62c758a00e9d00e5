"""The Ray Serve app: FastAPI and Serve only here, at the edge of `Replica`.

`with deployed(config, drafter_folder=...) as app:` starts one replica, yields a client, and removes every trace when
the body ends, however it ends.
"""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, LoggingConfig
from ray.util import placement_group, remove_placement_group
from ray.util.metrics import Counter, Gauge
from starlette.exceptions import HTTPException as StarletteHTTPException

from ray_eagle.cluster import marked
from ray_eagle.config import Config, ServeConfig, TargetConfig
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.errors import ConfigError, EagleError, InputError, ServingError
from ray_eagle.probing.probe import ProbeReport
from ray_eagle.serving import page
from ray_eagle.serving.child import free_port
from ray_eagle.serving.claim import claimed
from ray_eagle.serving.client import HandleClient
from ray_eagle.serving.engine import EngineFacts, Speculation
from ray_eagle.serving.events import NDJSON, Emit, Progressed, Reported
from ray_eagle.serving.listening import FREE_PORT, OWN_HOST, bindable, cannot_listen
from ray_eagle.serving.messages import (
    ConfigureRequest,
    DecodeReply,
    DecodeRequest,
    GenerateReply,
    GenerateRequest,
    Health,
    Info,
    ProbeRequest,
)
from ray_eagle.serving.replica import Replica
from ray_eagle.serving.streaming import streamed

logger = logging.getLogger(__name__)

POLL_S = 0.2
PAGE = "page"
Result = TypeVar("Result")


class _Metrics:
    """Counters of this replica; Ray prefixes the names with `ray_`."""

    def __init__(self) -> None:
        self._passes = Counter("eagle_verify_passes", "Verify passes.")
        self._accepted = Counter("eagle_accepted_draft_tokens", "Draft tokens that the target agreed with.")
        self._length = Gauge("eagle_acceptance_length", "Tokens of each verify pass, over the last answer.")

    def count(self, reply: GenerateReply) -> None:
        if not reply.passes:
            return
        accepted = sum(p.accepted for p in reply.passes)
        self._passes.inc(len(reply.passes))
        if accepted:
            self._accepted.inc(accepted)
        self._length.set(1 + accepted / len(reply.passes))


def authorise(request: Request) -> None:
    """401 unless the request carries the replica's bearer token, compared in constant time. The page is open: it is empty."""
    token = serve.get_replica_context().servable_object.token
    if token is None or request.scope["route"].name == PAGE:
        return
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise HTTPException(
            401, "expected the header `Authorization: Bearer TOKEN` with the token that serve.token set."
        )


api = FastAPI(title="ray_eagle", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(authorise)])


@api.exception_handler(EagleError)
async def _explained(request: Request, error: EagleError) -> JSONResponse:
    status = 400 if isinstance(error, InputError | ConfigError) else 500
    return JSONResponse({"error": str(error)}, status)


@api.exception_handler(RequestValidationError)
async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    faults = [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()]
    kind = request.headers.get("content-type", "none")
    if "json" not in kind and [e["loc"] for e in error.errors()] == [("body",)]:
        faults = [f"expected the header `Content-Type: application/json`, found {kind}"]
    return JSONResponse({"error": "; ".join(faults)}, 422)


@api.exception_handler(StarletteHTTPException)
async def _refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
    return JSONResponse({"error": error.detail}, error.status_code)


@serve.ingress(api)
class Server:
    """A replica behind HTTP and handles. Requests queue for the one engine thread, so Serve's own checks never wait."""

    _replica: Replica

    def __init__(
        self,
        target: TargetConfig,
        config: ServeConfig,
        drafter_folder: Path | None,
        random_shape: DrafterShape | None,
        seed: int,
        starting: Speculation | None,
    ) -> None:
        self.token = config.token
        # a server in a child process batches what comes at the same time
        self._thread = ThreadPoolExecutor(max_workers=1 if config.engine == "reference" else config.max_running)
        # threads of their own: a health check may wait for a server that hangs
        self._watch, self._facts = ThreadPoolExecutor(max_workers=1), ThreadPoolExecutor(max_workers=1)
        counted = _Metrics().count
        # in the engine's own thread: torch keeps its number of threads for each thread
        self._replica = self._thread.submit(
            Replica, target, config, drafter_folder, random_shape, seed, starting, on_reply=counted
        ).result()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return await self._queued(self._replica.generate, request)

    @api.get("/", name=PAGE)
    async def page(self) -> HTMLResponse:
        """A page to watch speculation on. It asks for the token itself."""
        return HTMLResponse(page.html(), headers=page.HEADERS)

    @api.post("/generate", response_model=None)
    async def generate_over_http(self, request: GenerateRequest, http: Request) -> GenerateReply | StreamingResponse:
        """One JSON object, or with `Accept: application/x-ndjson` a line for each verify pass."""
        if NDJSON not in http.headers.get("Accept", ""):
            return await self.generate(request)
        return await streamed(self._thread, lambda emit: self._replica.stream(request, emit))

    @api.post("/probe", response_model=None)
    async def probe_over_http(self, request: ProbeRequest, http: Request) -> ProbeReport | StreamingResponse:
        """A line for each prompt and the report as the last one, or with `Accept: application/json` the report alone."""
        if "application/json" in http.headers.get("Accept", ""):
            return await self._queued(self._replica.probe, request)

        def work(emit: Emit) -> None:
            def progress(done: int, total: int, note: str) -> None:
                emit(Progressed(done=done, total=total, note=note))

            emit(Reported(report=self._replica.probe(request, progress)))

        return await streamed(self._thread, work)

    @api.post("/configure")
    async def configure(self, request: ConfigureRequest) -> EngineFacts:
        return await self._queued(self._replica.configure, request)

    @api.post("/decode")
    async def decode(self, request: DecodeRequest) -> DecodeReply:
        return await self._queued(self._replica.decode, request)

    @api.get("/engine")
    async def engine(self) -> EngineFacts:
        return await self._queued(self._replica.engine)

    @api.get("/info")
    async def info(self) -> Info:
        return await asyncio.get_running_loop().run_in_executor(self._facts, self._replica.info)

    @api.get("/health")
    async def health(self) -> Health:
        return await self._queued(self._replica.health)

    async def check_health(self) -> None:
        """Asked by Serve every few seconds: an engine that can never answer again means a new replica."""
        await asyncio.get_running_loop().run_in_executor(self._watch, self._replica.check)

    def __del__(self) -> None:
        """Serve calls it before it ends the replica."""
        if hasattr(self, "_replica"):
            self._replica.close()

    async def _queued(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def application(
    config: Config,
    *,
    drafter_folder: Path | None = None,
    random_shape: DrafterShape | None = None,
    starting: Speculation | None = None,
) -> serve.Application:
    """The Serve application of these settings, with the drafter of a folder or a random one of a shape.

    `starting`: how a server in a child process drafts at first, instead of what the settings say.
    """
    deployment = serve.deployment(
        ray_actor_options={"num_cpus": config.serve.cpus, "num_gpus": config.serve.gpus}
        | marked(config.serve.gpus, ray.get_runtime_context().runtime_env if ray.is_initialized() else None),
        max_ongoing_requests=100,
        max_constructor_retry_count=1,  # the same files fail the same way
        health_check_period_s=2,
        graceful_shutdown_timeout_s=5,
    )
    return deployment(Server).bind(config.target, config.serve, drafter_folder, random_shape, config.seed, starting)


@contextmanager
def deployed(
    config: Config,
    *,
    drafter_folder: Path | None = None,
    random_shape: DrafterShape | None = None,
    starting: Speculation | None = None,
    app_name: str = "ray-eagle",
) -> Iterator[HandleClient]:
    """Deploy, yield a client, and remove the app; shut Serve down too if it was started here and no other app came.

    Ray must be connected. Raises ServingError that names the missing resources (after `ray.wait_s`), the replica's own
    error, or the state it is stuck in (after `serve.start_s`); and when an app of this name already runs.
    """
    if not ray.is_initialized():
        raise ServingError("server: expected a connection to Ray, found none. Call ray.init first.")
    _await_resources(config)
    with claimed():
        running = _get_global_client(raise_if_no_controller_running=False)
        if running and app_name in serve.status().applications:
            raise ServingError(
                f"server: the app {app_name!r} already runs on this cluster. Wait for the run that owns it, choose another "
                f"name, or remove it: serve.delete({app_name!r})."
            )
        try:
            prefix = f"/{app_name}" if running else "/"
            url = _start_http(config.serve) + prefix.rstrip("/")
            target = serve.RunTarget(
                application(config, drafter_folder=drafter_folder, random_shape=random_shape, starting=starting),
                name=app_name,
                route_prefix=prefix,
                logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
            )
            [handle] = serve.run_many([target], wait_for_applications_running=False)
        except BaseException:
            _remove(app_name, shut_down=running is None)
            raise
    try:
        _await_running(app_name, config.serve.start_s)
        yield HandleClient(handle, url)
    finally:
        if ray.is_initialized():
            with claimed():
                _remove(app_name, shut_down=running is None)


def _start_http(config: ServeConfig) -> str:
    """Start Serve unless it runs; the address of its proxy. A cluster has one, so a running one keeps its port."""
    if _get_global_client(raise_if_no_controller_running=False) is None:
        head = ray.get_runtime_context().gcs_address.rpartition(":")[0]
        here = head == ray.util.get_node_ip_address()
        port = bindable(config.host, config.port) if here else config.port or free_port()
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": config.host, "port": port})
        except (ray.exceptions.RayError, TimeoutError, RuntimeError) as error:
            raise cannot_listen(config.host, port, last_line(str(error)), f"{FREE_PORT} {OWN_HOST}") from error
    # Serve has no public way to ask where a running proxy listens
    options = _get_global_client().http_config
    if config.port not in (0, options.port) or options.host != config.host:
        logger.warning("Serve already runs on %s:%s and cannot be moved: using that.", options.host, options.port)
    host = ray.util.get_node_ip_address() if options.host in ("0.0.0.0", "::") else options.host
    return f"http://{host}:{options.port}"


def last_line(message: str) -> str:
    """Of a remote error, without colours and the traceback above: what was raised there."""
    return re.sub(r"\x1b\[[0-9;]*m", "", message).strip().splitlines()[-1].strip() if message.strip() else "no reason"


def _await_resources(config: Config) -> None:
    """Hold a place as large as the replica for a moment: the one way to learn whether a single node has it all."""
    demand = {name: n for name, n in (("CPU", config.serve.cpus), ("GPU", config.serve.gpus)) if n}
    place = placement_group([demand])
    try:
        if not place.wait(config.ray.wait_s):
            total, free = ray.cluster_resources(), ray.available_resources()
            have = ", ".join(f"{name} {free.get(name, 0):g} of {total.get(name, 0):g}" for name in demand)
            want = ", ".join(f"{name} {n:g}" for name, n in demand.items())
            raise ServingError(
                f"server: expected a node with {want} free for the replica within {config.ray.wait_s:g} s, found "
                f"{have} free in the whole cluster. Lower serve.cpus or serve.gpus, or free or add nodes."
            )
    finally:
        remove_placement_group(place)


def _await_running(app_name: str, start_s: float) -> None:
    """Wait until the app is healthy; raise ServingError with the replica's own words when it fails."""
    deadline = time.monotonic() + start_s
    while True:
        app = serve.status().applications[app_name]
        if app.status == ApplicationStatus.RUNNING:
            return
        messages = "\n".join([app.message, *(deployment.message for deployment in app.deployments.values())])
        if app.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise ServingError(f"server: the replica did not start: {_own_words(messages)}")
        if time.monotonic() > deadline:
            raise ServingError(
                f"server: expected a healthy replica within {start_s:g} s, found {app.status.value}. "
                f"{messages.strip()} Raise serve.start_s if loading takes longer."
            )
        time.sleep(POLL_S)


def _own_words(message: str) -> str:
    """The message of our own error at the end of a remote traceback, indented lines of a log included, or all of it."""
    found = re.findall(r"ray_eagle\.errors\.\w+: (.+(?:\n {4}\S.*)*)", message)
    return found[-1] if found else message.strip()


def _remove(app_name: str, *, shut_down: bool) -> None:
    if _get_global_client(raise_if_no_controller_running=False) is None:
        return
    if app_name in serve.status().applications:
        serve.delete(app_name)
    if shut_down and not serve.status().applications:
        serve.shutdown()
