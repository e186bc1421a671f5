"""Routers as an application, without a server in between; and the routes of quotas over a real catalog."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

from fastapi import APIRouter, FastAPI
from httpx import Response

from app.catalog.catalog import Catalog
from app.domain.ladder import MatchingRules
from app.http.access.access import Access
from app.http.problems import ProblemError
from app.http.routes.quotas import COMMON_RULES, router

KEY = "open-sesame"


def app_with(*routers: APIRouter) -> FastAPI:
    """An application of these routers, in which problems are answers."""
    app = FastAPI()
    for each in routers:
        app.include_router(each)

    @app.exception_handler(ProblemError)
    async def answer(request: object, problem: ProblemError) -> Any:
        return problem.response()

    return app


def app_of(catalog: Catalog, rules: MatchingRules = COMMON_RULES, *, timed: bool = False) -> FastAPI:
    """The routes of quotas as an application."""
    return app_with(router(catalog, Access(KEY, [ip_network("127.0.0.0/8")]), rules, timed=timed))


def fields(answer: Response, status: int = 422) -> list[str]:
    """The fields that a problem names."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert all(error["message"] for error in problem.get("errors", []))
    assert bool(problem.get("errors")) == (status == 422)
    return [error["field"] for error in problem.get("errors", [])]
