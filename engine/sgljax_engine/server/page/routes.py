"""The page, and the numbers that it draws."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.routes import OpenRoute


def page_routes(context: ServerContext) -> APIRouter:
    """The route of the page, which holds no data and needs no key."""
    router = APIRouter(route_class=OpenRoute)
    html = resources.files("sgljax_engine.server.page").joinpath("index.html").read_text("utf-8")
    headers = {
        "Content-Security-Policy": content_security_policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """A live picture of the engine."""
        return HTMLResponse(html, headers=headers)

    return router


def content_security_policy(html: str) -> str:
    """Allows the page's own script and style, by their hashes, and requests to this server."""

    def source(tag: str) -> str:
        text = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = [hashlib.sha256(each.encode()).digest() for each in text]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
