"""The application: every endpoint by name in one place, and the page, served or saved as one file."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import posixpath
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import IO, Any

from anyio.lowlevel import checkpoint
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from plume.config import ServeConfig, UserError
from plume.inference.cpu.pack import generates, pack, unsupported
from plume.inference.engine_factory import finite
from plume.lm import LM
from plume.serve import analysis, api_errors, chat, completions, explanations, schemas
from plume.serve.api_errors import ApiError
from plume.serve.generation import STREAM_HEADERS
from plume.serve.middleware import Guard, Metrics, Tracer
from plume.serve.run_views import Runs, curve, samples
from plume.serve.served_models import (
    Origin,
    ServedModels,
    describe,
    dump_json,
    model_entry,
    parameter_count,
    trim_regularly,
)

SUMMARY = "Text completion, scores, masks, labels and explanations of models that Plume trained or opened."
SWITCH_SECONDS = 0.0005  # that a thread may keep the interpreter while the event loop waits for it
FILE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
GENERATING: dict[str, tuple[Any, Callable[..., Any], str]] = {
    "completions": (schemas.CompletionRequest, completions.complete, "Continue a prompt; OpenAI's shape."),
    "chat/completions": (schemas.ChatRequest, chat.chat, "Answer messages; OpenAI's shape."),
    "responses": (schemas.ResponsesRequest, chat.responses, "Answer messages; OpenAI's Responses, stateless."),
}
READING: dict[str, tuple[Any, Callable[..., dict[str, Any]], str]] = {
    "embeddings": (schemas.EmbeddingRequest, analysis.embeddings, "A vector per text; OpenAI's shape."),
    "next-tokens": (schemas.NextTokensRequest, analysis.next_tokens, "The most likely next tokens."),
    "score": (schemas.ScoreRequest, analysis.score, "Log-probability, rank and entropy of each token."),
    "fill-mask": (schemas.FillMaskRequest, analysis.fill_mask, "The most likely tokens at each mask."),
    "tokenize": (schemas.TokenizeRequest, analysis.tokenize, "Token ids, pieces, bytes and spans."),
    "classify": (schemas.ClassifyRequest, analysis.classify, "A label for each text, or each pair of texts."),
    "tag": (schemas.TagRequest, analysis.tag, "A tag for each word."),
    "answer": (schemas.AnswerRequest, analysis.answer, "The span of a text that answers a question."),
    "predict": (schemas.PredictRequest, analysis.predict, "A prediction for each row of a fine-tuned model's task."),
    "choose": (schemas.ChooseRequest, analysis.choose, "Which choice continues a context or answers a question."),
    "next-sentence": (schemas.NextSentenceRequest, analysis.next_sentence, "Whether one sentence follows another."),
    "translate": (schemas.TranslateRequest, analysis.translate, "What an encoder-decoder writes for a source text."),
    "explain": (
        schemas.ExplainRequest,
        explanations.explain,
        "Activations, attention, contributions, interventions of a text.",
    ),
}


def create_app(config: ServeConfig, *, log: IO[str] | None = None) -> FastAPI:
    """The server as an ASGI application. Models are opened when it starts."""
    runs = Runs(config.runs)
    models = ServedModels(config, runs.checkpoints)
    tracer = Tracer() if config.telemetry else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await checkpoint()  # imports anyio's part for asyncio, before a request does
        if not models.opened:
            await asyncio.to_thread(models.open_all)
        sys.setswitchinterval(SWITCH_SECONDS)
        trimming = asyncio.create_task(trim_regularly())
        app.state.ready = True
        yield
        app.state.ready = False
        trimming.cancel()
        await asyncio.to_thread(models.close)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = FastAPI(title="Plume", summary=SUMMARY, version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.ready, app.state.models, app.state.metrics = False, models, Metrics()
    app.state.metrics.registry.register(SchedulerMetrics(models))
    api_errors.install(app)
    install_models(app, models)
    install_runs(app, runs)
    install_health(app)
    install_page(app)
    app.add_middleware(Guard, config=config, metrics=app.state.metrics, log=log, tracer=tracer)
    return app


class SchedulerMetrics:
    """What schedulers count, read when /metrics is."""

    def __init__(self, models: ServedModels) -> None:
        self.models = models

    def collect(self) -> Any:
        gauges = {name: GaugeMetricFamily(f"plume_{name}", text, labels=["model"]) for name, text in (
            ("waiting", "Sequences in the queue"), ("running", "Sequences being generated"),
            ("reading", "Readings under way"))}  # fmt: skip
        names = ("steps", "tokens", "finished", "cancelled", "timed_out", "failed")
        counters = {n: CounterMetricFamily(f"plume_scheduler_{n}", f"Scheduler: {n}", labels=["model"]) for n in names}
        reused = CounterMetricFamily("plume_reused_tokens", "Prompt tokens found in the cache", labels=["model"])
        for served in self.models.opened:
            scheduler = served.scheduler
            for name, gauge in gauges.items():
                gauge.add_metric([served.name], getattr(scheduler, name))
            for name, family in counters.items():
                family.add_metric([served.name], getattr(scheduler.counters, name))
            if scheduler.batcher is not None:
                reused.add_metric([served.name], scheduler.batcher.reused_tokens)
        return [*gauges.values(), *counters.values(), reused]


# ---- models ------------------------------------------------------------------------------------------------------


def install_models(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v1/models", tags=["models"])
    async def list_models() -> dict[str, Any]:
        """Every model, with what it can do."""
        return {"object": "list", "data": await asyncio.to_thread(models.listing)}

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def one_model(name: str) -> dict[str, Any]:
        for row in await asyncio.to_thread(models.listing):
            if row["id"] == name:
                return row
        raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")

    for path, (schema, handler, summary) in GENERATING.items():
        install_generating(app, models, f"/v1/{path}", schema, handler, summary)
    for path, (schema, handler, summary) in READING.items():
        install_reading(app, models, f"/v1/{path}", schema, handler, summary)


def install_generating(
    app: FastAPI, models: ServedModels, path: str, schema: Any, handler: Callable[..., Any], summary: str
) -> None:
    async def endpoint(body: Any, request: Request) -> Response:
        request.state.ignored = body.ignored
        response: Response = await handler(await models.get(body.model), body, request)
        return response

    endpoint.__annotations__["body"] = schema
    app.post(path, tags=["generating"], summary=summary, response_model=None)(endpoint)


def install_reading(
    app: FastAPI, models: ServedModels, path: str, schema: Any, handler: Callable[..., dict[str, Any]], summary: str
) -> None:
    async def endpoint(body: Any, request: Request) -> Response:
        request.state.ignored = body.ignored
        served = await models.get(body.model)
        work = lambda: dump_json(handler(served, body))  # noqa: E731
        content = await served.read(work, request.state.client, request.state.deadline)
        return Response(content, media_type="application/json")

    endpoint.__annotations__["body"] = schema
    app.post(path, tags=["reading"], summary=summary, response_model=None)(endpoint)


# ---- runs --------------------------------------------------------------------------------------------------------


def install_runs(app: FastAPI, runs: Runs) -> None:
    def folder_of(name: str) -> Any:
        folders = runs.folders()
        if name not in folders:
            raise ApiError(404, f"there is no run {name!r}", code="run_not_found")
        return folders[name]

    @app.get("/v1/runs", tags=["runs"])
    async def list_runs() -> dict[str, Any]:
        """Training runs, the latest first."""
        return {"runs": await asyncio.to_thread(runs.listing)}

    @app.get("/v1/runs/{name}", tags=["runs"])
    async def one_run(name: str) -> Response:
        """All metrics and samples of a run."""

        def content() -> bytes:
            folder = folder_of(name)
            return dump_json({"name": name, "records": [*curve(folder), *samples(folder)]})

        return Response(await asyncio.to_thread(content), media_type="application/json")

    @app.get("/v1/runs/{name}/events", tags=["runs"])
    async def follow_run(name: str, request: Request) -> StreamingResponse:
        """The same as server-sent events while the run is training, until the server's timeout; then connect again."""
        folder = await asyncio.to_thread(folder_of, name)
        news = runs.follow(folder, lambda: app.state.ready, request.state.deadline)

        async def events() -> AsyncIterator[bytes]:
            async for records in news:
                if records is None:
                    yield b": keep-alive\n\n"
                else:
                    yield b"data: %s\n\n" % await asyncio.to_thread(dump_json, records)

        return StreamingResponse(events(), media_type="text/event-stream", headers=STREAM_HEADERS)


# ---- health ------------------------------------------------------------------------------------------------------


def install_health(app: FastAPI) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["health"])
    async def healthz() -> JSONResponse:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["health"])
    async def readyz() -> JSONResponse:
        """Models are open and requests are accepted."""
        ready = app.state.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, status_code=200 if ready else 503)

    @app.get("/metrics", tags=["health"])
    async def metrics() -> Response:
        """Metrics in Prometheus's format."""
        return Response(generate_latest(app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


# ---- the page ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    tag: str


def static_files() -> dict[str, StaticFile]:
    """Read once: a name that is not among them does not exist."""
    found: dict[str, StaticFile] = {}

    def walk(folder: Traversable, path: str) -> None:
        for item in folder.iterdir():
            if item.is_dir():
                walk(item, f"{path}{item.name}/")
            elif (ending := item.name.rpartition(".")[2]) in FILE_TYPES:
                content = item.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                found[path + item.name] = StaticFile(content, f"{FILE_TYPES[ending]}; charset=utf-8", tag)

    walk(files("plume.serve") / "static", "")
    return found


def install_page(app: FastAPI) -> None:
    known = static_files()

    def send(request: Request, name: str) -> Response:
        if (file := known.get(name)) is None:
            raise ApiError(404, "there is no such page")
        headers = {"ETag": file.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    @app.get("/", include_in_schema=False)
    async def explorer(request: Request) -> Response:
        return send(request, "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return send(request, "docs.html")

    @app.get("/static/{name:path}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        return send(request, name)


# ---- the page as one file ----------------------------------------------------------------------------------------

PAGE_TOKENIZERS = ("byte-bpe", "bytes", "characters")
IMPORTED = re.compile(r"""((?:from|import) ?\(?)(['`])(\.{1,2}/[^'`]+)""")
PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:"


def saved_page(lm: LM, name: str) -> str:
    """One HTML file with the page and the 8-bit weights of a decoder; it computes in the browser, without a server."""
    reason = unsupported(lm.config)
    if reason is None and not generates(lm.config, lm.head):
        reason = "it does not predict the next token"
    if reason is None and lm.tokenizer.kind not in PAGE_TOKENIZERS:
        reason = f"its tokenizer is {lm.tokenizer.kind}, and a page runs {', '.join(PAGE_TOKENIZERS)}"
    if reason is not None:
        raise UserError(f"{name} cannot be saved as a page: {reason}; without --save it is served")
    known = {path: file.content.decode() for path, file in static_files().items()}
    packed = pack(finite(lm.model).cpu(), "int8")
    modules = {path: text for path, text in known.items() if path.endswith(".js") and path not in ("api.js", "docs.js")}
    modules["api.js"] = modules.pop("saved/api.js")
    imports = {f"plume/{path}": data_url("text/javascript", absolute(path, text)) for path, text in modules.items()}
    data = page_data(lm, name) | {"offsets": packed.offsets.tolist()}
    icon = f'<link rel="icon" href="{data_url(FILE_TYPES["svg"], known["plume.svg"])}">'
    head = [
        f'<meta http-equiv="Content-Security-Policy" content="{PAGE_POLICY}">',
        f"<style>{known['style.css']}</style>",
        f'<script type="importmap">{json.dumps({"imports": imports})}</script>',
        "<script type=\"module\">import 'plume/app.js'</script>",
    ]
    weights = base64.b64encode(packed.block.tobytes()).decode()
    body = [
        f'<script type="application/json" id="plume-model">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>',
        f'<script type="text/plain" id="plume-weights">{weights}</script>',
    ]
    page = re.sub(r"\s*(<link [^>]*>|<script [^>]*></script>|<noscript>.*?</noscript>)", "", known["index.html"])
    page = page.replace('href="/"', 'href="#"').replace("</head>", "\n".join([icon, *head, "</head>"]))
    return page.replace("</body>", "\n".join([*body, "</body>"]))


def absolute(path: str, text: str) -> str:
    """A module's text with names of the import map in place of relative ones; saved/api.js stands at api.js."""
    folder = posixpath.join("plume", "saved" if path == "api.js" else posixpath.dirname(path))
    return IMPORTED.sub(lambda m: m[1] + m[2] + posixpath.normpath(posixpath.join(folder, m[3])), text)


def data_url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def page_data(lm: LM, name: str) -> dict[str, Any]:
    """What a saved page must know beside the weights: the model as the server lists it, its shape, its tokenizer."""
    config, tokenizer = lm.config, lm.tokenizer
    about = describe(lm, Origin(name)) | {"engine": "this page, int8", "parameters": parameter_count(lm)}
    opens, closes = ("".join("01"[bool(x)] for x in table) for table in tokenizer.word_tables)
    definition = tokenizer.definition
    shape = {"layers": config.layers, "width": config.width, "heads": config.heads, "mlp": config.ffn_width,
             "vocabulary": about["vocabulary"], "context": config.context, "post": config.norm == "post",
             "band": config.band, "activation": config.activation,
             "embed_scale": config.width**0.5 if config.embed_scale else 1}  # fmt: skip
    cut = {"kind": tokenizer.kind, "tokens": definition.tokens, "merges": definition.merges,
           "special": list(definition.added), "start": tokenizer.start, "ends": list(tokenizer.ends),
           "unknown": tokenizer.unknown, "opens": opens, "closes": closes}  # fmt: skip
    return {"entry": model_entry(name, about), "config": shape, "tokenizer": cut}
