"""The static files of the page, read once: what is not among them does not exist."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from plume.serve.errors import ApiError

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class File:
    content: bytes
    kind: str
    tag: str


def static_files() -> dict[str, File]:
    found: dict[str, File] = {}

    def walk(folder: Traversable, path: str) -> None:
        for item in folder.iterdir():
            if item.is_dir():
                walk(item, f"{path}{item.name}/")
            elif (ending := item.name.rpartition(".")[2]) in TYPES:
                content = item.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                found[path + item.name] = File(content, f"{TYPES[ending]}; charset=utf-8", tag)

    walk(files("plume.serve") / "static", "")
    return found


def install(app: FastAPI) -> None:
    known = static_files()

    def send(request: Request, name: str) -> Response:
        if (file := known.get(name)) is None:
            raise ApiError(404, "there is no such page")
        headers = {"ETag": file.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.kind, headers=headers)

    @app.get("/", include_in_schema=False)
    async def explorer(request: Request) -> Response:
        return send(request, "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return send(request, "docs.html")

    @app.get("/static/{name:path}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        return send(request, name)
