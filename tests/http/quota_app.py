"""The routes of quotas over a real catalog, without a server in between."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

from fastapi import FastAPI
from httpx import Response

from app.catalog.catalog import Catalog
from app.http.access import Access
from app.http.problems import Problem
from app.http.quotas import router

KEY = "open-sesame"


def app_of(catalog: Catalog) -> FastAPI:
    app = FastAPI()
    app.include_router(router(catalog, Access(KEY, [ip_network("127.0.0.0/8")])))

    @app.exception_handler(Problem)
    async def answer(request: object, problem: Problem) -> Any:
        return problem.response()

    return app


def fields(answer: Response, status: int = 422) -> list[str]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert all(error["message"] for error in problem.get("errors", []))
    assert bool(problem.get("errors")) == (status == 422)
    return [error["field"] for error in problem.get("errors", [])]
