"""An engine over HTTP: SGLang's, vLLM's and OpenAI's routes. Needs the extra [server].

It uses the engine's public names only. `Server` listens on a thread of its own, and `create_app`
makes an ASGI app for another server.
"""

from __future__ import annotations

from sgljax_engine.server.app import create_app
from sgljax_engine.server.config import ServerConfig
from sgljax_engine.server.server import Server

__all__ = ["Server", "ServerConfig", "create_app"]
