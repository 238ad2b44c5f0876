"""The dashboard as a Starlette app: HTML pages, SVG charts and `/metrics` of one run directory. GET only, no state.

Templates escape everything that they are given; the policy below forbids scripts and whatever is not served from here.
Endpoints are plain functions, which Starlette runs in threads: none holds up the event loop.
"""

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from gyre.core.errors import GyreError
from gyre.dashboard import pages
from gyre.dashboard.metrics import RunMetrics
from gyre.dashboard.view import RunView
from gyre.report.text import visible

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# A chart is styled by attributes. Opened by itself it still runs nothing and loads nothing.
CHART_HEADERS = HEADERS | {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}


def make_app(view: RunView, *, any_host: bool = False) -> Starlette:
    """`any_host` answers requests for any host name; otherwise only those for loopback names, so that no web page can
    reach the run through a name that it makes point here."""
    metrics = RunMetrics(view.store)
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("gyre.dashboard"),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (files("gyre.dashboard") / "templates" / "style.css").read_bytes()

    def html(name: str, context: Mapping[str, Any], status: int = 200) -> Response:
        return HTMLResponse(templates.get_template(name).render(context), status, HEADERS)

    def page(name: str, make: Callable[[RunView, Request], Mapping[str, Any]]) -> Callable[[Request], Response]:
        return lambda request: html(name, make(view, request))

    def chart(request: Request) -> Response:
        name = request.path_params["name"]
        drawn = view.chart(name)
        if drawn is None:
            raise HTTPException(404, f"There is no chart {name}, or nothing to draw in it yet.")
        return Response(drawn, 200, CHART_HEADERS, "image/svg+xml")

    def scrape(request: Request) -> Response:
        body, content_type = metrics.scrape(request.headers.get("accept", ""))
        return Response(body, 200, HEADERS | {"Content-Type": content_type})

    def refuse(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else str(error)
        return html("error.html", {"run": view.run.root.name, "status": status, "detail": detail}, status)

    return Starlette(
        routes=[
            Route("/", page("overview.html", pages.overview)),
            Route("/executions", page("executions.html", pages.executions)),
            Route("/executions/{execution}", page("execution.html", pages.execution)),
            Route("/executions/{execution}/calls/{seq:int}", page("call.html", pages.call)),
            Route("/charts/{name}.svg", chart),
            Route("/metrics", scrape),
            Route("/style.css", lambda _: Response(style, 200, HEADERS, "text/css")),
        ],
        middleware=[] if any_host else [Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK_NAMES))],
        exception_handlers={HTTPException: refuse, GyreError: refuse},
    )


def _shown(value: Any) -> Any:
    """What a template prints, before it is escaped; what a macro made is escaped already."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
