"""The HTTP edge: routes, ids, errors. `make_app(config, text, backend)` is all that the composition root
needs.

    body ─► JSON ─► parameters ─► class, promises ─► prompt ids ─► limits ─► Job ─► Answer
                                                              every error before this: no device time

FastAPI is the container that Serve expects; bodies are read by body.py and schema.py, because its own
validation answers in a form that no OpenAI client reads, and turns some bodies into a 500.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts.config import BatonConfig
from contracts.errors import BatonError, RequestError
from coordinator import openapi
from coordinator.answer import Answer
from coordinator.backend import Backend
from coordinator.body import read_json
from coordinator.debug import audit_json, check_debug_access, decisions_json, peers_json
from coordinator.drain import SHUTTING_DOWN, Drain
from coordinator.errors_http import (
    as_baton_error,
    error_response,
    from_http_exception,
    json_response,
    log_fault,
)
from coordinator.fields import shown
from coordinator.gateway.context import CURRENT
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.meter import MeteredBackend
from coordinator.ingress import request_id_of
from coordinator.job import Endpoint, Job, check_num_choices, make_job
from coordinator.metrics import CONTENT_TYPE, Metrics
from coordinator.models import Models
from coordinator.outputs import Outputs
from coordinator.promises import tier_of
from coordinator.prompts import Prompt, chat_prompt, completion_prompts, read_messages, read_prompts
from coordinator.responses import chat_body, check_logprobs, mirror, named_as_responses
from coordinator.schema import Params, parse_chat, parse_completion
from coordinator.shape import Shape, behind_prompt, chat_shape, completion_shape, with_checked_grammar
from coordinator.tokenize import detokenize, tokenize
from coordinator.tools import read_tools
from engine.text.tokenizer import TextModel
from engine.text.trial import GrammarTrial

# Rendering and tokenising less than this takes well under 5 ms.
_MAX_INLINE_BYTES = 4096
_ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/models": "models",
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/health": "health",
    "/ready": "ready",
    "/metrics": "metrics",
    "/debug/kv": "debug",
    "/debug/decisions": "debug",
    "/debug/peers": "debug",
}
_WITH_IDS = ("/v1/models", "/v1/files", "/v1/batches")

Result = TypeVar("Result")


def make_app(
    config: BatonConfig,
    text: TextModel,
    backend: Backend,
    metrics: Metrics | None = None,
    sees_clients: bool = True,
    drain: Drain | None = None,
) -> FastAPI:
    """The application. Every response, errors included, carries `x-request-id` and OpenAI's forms.

    `sees_clients` False: peers' addresses say nothing about clients (a proxy that hides them stands before
    this application), so /debug/* needs the admin key. `drain`: whoever stops the process ends the open requests by it.
    """
    metrics, drain = metrics or Metrics(), drain or Drain()
    gateway = Gateway(config, config.model.served_name or text.name, metrics, drain)
    edge = Edge(config, text, MeteredBackend(backend), metrics, sees_clients, drain)
    app = FastAPI(
        title="Baton",
        redirect_slashes=False,  # a route is its exact path: a redirect would lose the scheme behind a proxy
        openapi_url=None,  # its generator knows nothing of these routes; openapi.py does
        routes=[
            Route("/v1/chat/completions", edge.chat, methods=["POST"]),
            Route("/v1/responses", edge.responses, methods=["POST"]),
            Route("/v1/completions", edge.completions, methods=["POST"]),
            Route("/v1/models", edge.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", edge.model, methods=["GET"]),
            Route("/tokenize", edge.tokenize, methods=["POST"]),
            Route("/detokenize", edge.detokenize, methods=["POST"]),
            Route("/health", edge.health, methods=["GET"]),
            Route("/ready", edge.ready, methods=["GET"]),
            Route("/version", edge.version, methods=["GET"]),
            Route("/metrics", edge.show_metrics, methods=["GET"]),
            Route("/debug/kv", edge.debug_kv, methods=["GET"]),
            Route("/debug/peers", edge.debug_peers, methods=["GET"]),
            Route("/debug/decisions", edge.debug_decisions, methods=["GET"]),
            *openapi.routes(baton_version()),
            *gateway.jobs.routes(),
        ],
    )
    app.add_exception_handler(BatonError, edge.on_error)
    app.add_exception_handler(HTTPException, edge.on_error)
    app.state.gateway = gateway
    gateway.install(app, edge.on_error)
    app.add_middleware(RequestScope, edge=edge)
    return app


def baton_version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:  # run from a checkout
        return "0+checkout"


class Edge:
    """The routes, with what they share."""

    def __init__(
        self,
        config: BatonConfig,
        text: TextModel,
        backend: Backend,
        metrics: Metrics,
        sees_clients: bool,
        drain: Drain,
    ) -> None:
        self._config = config
        self._drain = drain
        self._sees_clients = sees_clients
        self._text = text
        self._trial = GrammarTrial(text)
        self._backend = backend
        self.metrics = metrics
        self._model = config.model.served_name or text.name
        self._models = Models(config, self._model, lambda: backend.capacity().max_total_tokens)
        metrics.watch_workers(lambda: backend.readiness().workers)

    async def chat(self, request: Request) -> Response:
        self._drain.check()
        return await self._chat("chat", await self._body(request))

    async def responses(self, request: Request) -> Response:
        self._drain.check()
        body = await self._body(request)
        chat = chat_body(body)
        with named_as_responses():
            return await self._chat("responses", chat, mirror(body))

    async def _chat(
        self, endpoint: Endpoint, body: dict[str, Any], repeated: dict[str, Any] | None = None
    ) -> Response:
        params, messages = parse_chat(body), read_messages(body)
        self._check_model(params)
        told = self._settle(params)
        check_num_choices(params, 1, self._config.server.max_choices)
        tools = read_tools(body)
        shape = chat_shape(body, params, tools, self._text)
        if endpoint == "responses":
            check_logprobs(params, shape.reading)
        limit = self._backend.capacity().max_total_tokens
        size = sum(len(message["content"]) for message in messages)
        if tools is not None:  # seldom short, and to measure them takes as long as to render them
            size += _MAX_INLINE_BYTES + 1
        prompt = await off_loop(size, lambda: chat_prompt(self._text, messages, params, limit, tools))
        shape = await with_checked_grammar(shape, self._trial)
        shape = replace(behind_prompt(shape, prompt.tail), mirror=(repeated or {}) | told)
        return self._answer(endpoint, params, [prompt], shape)

    async def completions(self, request: Request) -> Response:
        self._drain.check()
        body = await self._body(request)
        params = parse_completion(body)
        self._check_model(params)
        told = self._settle(params)
        limit = self._backend.capacity().max_total_tokens
        sources = read_prompts(body, self._text.vocab_size, self._config.server.max_choices, limit)
        check_num_choices(params, len(sources), self._config.server.max_choices)
        size = sum(map(len, sources))
        prompts = await off_loop(size, lambda: completion_prompts(self._text, sources, params, limit))
        shape = replace(await with_checked_grammar(completion_shape(body), self._trial), mirror=told)
        return self._answer("completions", params, prompts, shape)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": self._models.cards()})

    async def model(self, request: Request) -> Response:
        return json_response(self._models.card(request.path_params["model_id"]))

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        self._check_name(body)
        limit = self._backend.capacity().max_total_tokens
        work = functools.partial(tokenize, body, self._text, limit)
        return json_response(await asyncio.to_thread(work))

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        self._check_name(body)
        return json_response(detokenize(body, self._text))

    async def health(self, request: Request) -> Response:
        """The process answers; whether it can serve is /ready's business."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        readiness = self._backend.readiness()
        pools = {
            pool.role: {"num_workers": pool.num_workers, "num_ready": pool.num_ready}
            for pool in readiness.pools
        }
        is_ready = readiness.is_ready and not self._drain.is_draining
        reason = SHUTTING_DOWN if self._drain.is_draining else readiness.reason
        content = {"is_ready": is_ready, "reason": reason, "pools": pools}
        if is_ready:
            return json_response(content)
        return json_response(content, 503, {"Retry-After": "1"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": baton_version()})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def debug_kv(self, request: Request) -> Response:
        check_debug_access(request, self._config.server.admin_key, self._sees_clients)
        return json_response(audit_json(await self._backend.audit()))

    async def debug_decisions(self, request: Request) -> Response:
        check_debug_access(request, self._config.server.admin_key, self._sees_clients)
        plans, now_s = self._backend.plans(), time.monotonic()
        return json_response(decisions_json(self._backend.decisions(), plans, now_s))

    async def debug_peers(self, request: Request) -> Response:
        check_debug_access(request, self._config.server.admin_key, self._sees_clients)
        return json_response(peers_json(self._backend.readiness().workers))

    async def on_error(self, request: Request, error: Exception) -> Response:
        """Every error that has no response yet."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        ours = (
            from_http_exception(request, error) if isinstance(error, HTTPException) else as_baton_error(error)
        )
        log_fault(ours, request.scope.get("baton.request_id", ""))
        self.metrics.error(endpoint_of(request.scope), ours.code)
        response = error_response(ours)
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})
        return response

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json(request, self._config.server.max_body_bytes)

    def _answer(self, endpoint: Endpoint, params: Params, prompts: list[Prompt], shape: Shape) -> Response:
        capacity = self._backend.capacity()
        job: Job = make_job(endpoint, self._model, params, prompts, self._text, capacity, shape)
        for prompt in prompts:
            self.metrics.prompt(len(prompt.ids))
        coordinator = self._config.coordinator
        outputs = Outputs(job, self._text, self._backend, self.metrics, coordinator.request_timeout_s)
        return Answer(job, self._text, outputs, self.metrics, coordinator, self._drain)

    def _settle(self, params: Params) -> dict[str, Any]:
        """Class and promises, before any work; what the answer says of them: the tier, if one was asked for.

        Raises RequestError, PermissionDenied: see promises.read_service.
        """
        context, tier = CURRENT.get(), params.service_tier
        if context is None:
            return {}
        service = context.settle(self._config.slo, tier, params.model or self._model)
        return {} if tier is None else {"service_tier": tier_of(service.service_class, tier)}

    def _check_name(self, body: dict[str, Any]) -> None:
        """As `_check_model`, where no parameters are read: another model has other tokens."""
        name = body.get("model")
        if not isinstance(name, str | None):
            raise RequestError(f"model: expected text but got {shown(name)}", param="model")
        if name is not None:
            self._models.require(name)

    def _check_model(self, params: Params) -> None:
        """A missing name means the one model there is."""
        if params.model is not None:
            self._models.require(params.model)


class RequestScope:
    """Around everything: the request id, the count of responses, and the last net under an unforeseen
    exception.

    Pure ASGI: a framework middleware would hide the client's leaving from the routes.
    """

    def __init__(self, app: ASGIApp, edge: Edge) -> None:
        self._app = app
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        scope["baton.request_id"] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if not getattr(scope["app"].state, "ids_are_told_outside", False):
                    MutableHeaders(scope=message)["x-request-id"] = request_id
                self._edge.metrics.response(endpoint_of(scope), message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_started:  # the server closes the connection, which is all that is left to say
                raise
            response = await self._edge.on_error(Request(scope), error)
            await response(scope, receive, send_with_id)


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """`work` in a thread if its input is long; the tokenizer lets other threads run meanwhile."""
    return work() if size <= _MAX_INLINE_BYTES else await asyncio.to_thread(work)


def endpoint_of(scope: Scope) -> str:
    """The metric label of a path: a closed set, whatever clients ask for."""
    path: str = scope["path"]
    root = "/".join(path.split("/", 3)[:3])
    return _ENDPOINTS[root] if root in _WITH_IDS else _ENDPOINTS.get(path, "other")
