"""The application: every endpoint, by name, in one place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from plume.config import ServeConfig
from plume.serve import analysis, errors, page, schemas
from plume.serve.completions import complete, sse
from plume.serve.errors import ApiError
from plume.serve.guard import Figures, Guard
from plume.serve.models import Models
from plume.serve.runs import Runs, curve, samples

SUMMARY = "Text completion, scores, masks, labels and explanations of models that Plume trained or opened."


def create_app(config: ServeConfig, *, log: IO[str] | None = None) -> FastAPI:
    """The server as an ASGI application. Models are opened when it starts."""
    runs = Runs(config.runs)
    models = Models(config, runs.checkpoints)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        if not models.opened:
            await asyncio.to_thread(models.open_all)
        app.state.ready = True
        yield
        app.state.ready = False
        await asyncio.to_thread(models.close)

    app = FastAPI(title="Plume", summary=SUMMARY, version="1", lifespan=life, docs_url=None, redoc_url=None)
    app.state.ready, app.state.models, app.state.figures = False, models, Figures()
    app.state.figures.registry.register(SchedulerFigures(models))
    errors.install(app)
    install_models(app, models)
    install_analysis(app, models)
    install_runs(app, runs)
    install_health(app)
    page.install(app)
    app.add_middleware(Guard, config=config, figures=app.state.figures, log=log)
    return app


class SchedulerFigures:
    """What schedulers know, at the moment somebody asks."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def collect(self) -> Any:
        gauges = {name: GaugeMetricFamily(f"plume_{name}", text, labels=["model"]) for name, text in (
            ("waiting", "Sequences that wait"), ("active", "Sequences that are being written"))}  # fmt: skip
        names = ("steps", "tokens", "finished", "cancelled", "timed_out", "failed")
        counters = {n: CounterMetricFamily(f"plume_scheduler_{n}", f"Scheduler: {n}", labels=["model"]) for n in names}
        reused = CounterMetricFamily("plume_reused_tokens", "Prompt tokens not read again", labels=["model"])
        for served in self.models.opened:
            if (scheduler := served.scheduler) is not None:
                gauges["waiting"].add_metric([served.name], scheduler.waiting)
                gauges["active"].add_metric([served.name], scheduler.active)
                reused.add_metric([served.name], scheduler.runner.reused_tokens)
                for name, family in counters.items():
                    family.add_metric([served.name], getattr(scheduler.counters, name))
        return [*gauges.values(), *counters.values(), reused]


def install_health(app: FastAPI) -> None:
    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"])
    async def readyz() -> JSONResponse:
        """Models are open and requests are taken."""
        ready = app.state.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, status_code=200 if ready else 503)

    @app.get("/metrics", tags=["health"])
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(generate_latest(app.state.figures.registry), media_type=CONTENT_TYPE_LATEST)


def install_models(app: FastAPI, models: Models) -> None:
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

    @app.post("/v1/completions", tags=["writing"])
    async def completions(asked: schemas.CompletionRequest, request: Request) -> Response:
        """Continue a prompt, whole or as a stream; OpenAI's shape."""
        return await complete(await models.get(asked.model), asked, request, request.state.client)

    @app.post("/v1/embeddings", tags=["reading"])
    async def embeddings(asked: schemas.EmbeddingRequest) -> dict[str, Any]:
        """A vector per text; OpenAI's shape."""
        return await analysis.embeddings(await models.get(asked.model), asked)


def install_analysis(app: FastAPI, models: Models) -> None:
    @app.post("/v1/next-tokens", tags=["reading"])
    async def next_tokens(asked: schemas.NextTokensRequest) -> dict[str, Any]:
        """The likeliest next tokens, and the weight of all others."""
        return await analysis.next_tokens(await models.get(asked.model), asked)

    @app.post("/v1/score", tags=["reading"])
    async def score(asked: schemas.ScoreRequest) -> dict[str, Any]:
        """How expected every token of a text was."""
        return await analysis.score(await models.get(asked.model), asked)

    @app.post("/v1/fill-mask", tags=["reading"])
    async def fill_mask(asked: schemas.FillMaskRequest) -> dict[str, Any]:
        """What may stand at each mask."""
        return await analysis.fill_mask(await models.get(asked.model), asked)

    @app.post("/v1/tokenize", tags=["reading"])
    async def tokenize(asked: schemas.TokenizeRequest) -> dict[str, Any]:
        """How a text is cut: ids, pieces, bytes, places."""
        return await analysis.tokenize(await models.get(asked.model), asked)

    @app.post("/v1/classify", tags=["reading"])
    async def classify(asked: schemas.TextsRequest) -> dict[str, Any]:
        """A label for each text, or for each pair of texts."""
        return await analysis.classify(await models.get(asked.model), asked)

    @app.post("/v1/tag", tags=["reading"])
    async def tag(asked: schemas.TagRequest) -> dict[str, Any]:
        """A tag for each word."""
        return await analysis.tag(await models.get(asked.model), asked)

    @app.post("/v1/answer", tags=["reading"])
    async def answer(asked: schemas.AnswerRequest) -> dict[str, Any]:
        """The stretch of a context that answers a question."""
        return await analysis.answer(await models.get(asked.model), asked)

    @app.post("/v1/explain", tags=["reading"])
    async def explain(asked: schemas.ExplainRequest) -> dict[str, Any]:
        """Attention, the numbers of one head, or what each layer would say."""
        return await analysis.explain(await models.get(asked.model), asked)


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
    async def one_run(name: str) -> dict[str, Any]:
        """All figures and samples of a run."""
        folder = folder_of(name)
        return {"name": name, "records": await asyncio.to_thread(lambda: [*curve(folder), *samples(folder)])}

    @app.get("/v1/runs/{name}/events", tags=["runs"])
    async def follow_run(name: str) -> StreamingResponse:
        """The same as server-sent events, going on while the run does."""
        news = runs.follow(folder_of(name), lambda: app.state.ready)

        async def events() -> AsyncIterator[str]:
            async for told in news:
                yield sse(told)

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
