"""Serving: a scheduler with continuous batching, an HTTP API that OpenAI's clients speak, and the Explorer page."""

from plume.serve.app import create_app
from plume.serve.server import CellPage, explore, new_key, serve

__all__ = ["CellPage", "create_app", "explore", "new_key", "serve"]
