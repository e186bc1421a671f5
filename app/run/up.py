"""The supervisor of `quotagate up`: starts and stops store, migrations, API and workers in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from app.node import home
from app.node.children import Child, SupervisorSignals
from app.node.command_lines import program, quotagate
from app.node.errors import StartError
from app.node.settings import PREFIX, Settings
from app.run.api_processes import ApiProcesses
from app.run.embedded import embedded_store
from app.run.listening import Listeners
from app.run.serve import FIXED, check_envoy, pinned, print_key


def up(settings: Settings, read: Callable[[], Settings], *, options: tuple[str, ...] = ()) -> None:
    """Run everything until SIGINT or SIGTERM.

    Args:
        read: reads the settings again, when SIGHUP asks for a restart.
        options: command-line options for the children.
    """
    check_envoy(settings)
    directory = home.make(settings.home)
    with contextlib.ExitStack() as resources:
        resources.callback(os.close, home.lock(directory))
        children = home.lock_of_children(directory)
        resources.callback(os.close, children)
        home.restrict_access(directory)
        if settings.admin_key is None:
            key, made = home.admin_key(directory)
            if made:
                print_key(settings, key)
        listeners = resources.enter_context(Listeners.of(settings))
        run = partial(_run, settings, read, directory, listeners, children, options)
        asyncio.run(_supervise(run))


async def _supervise(run: Callable[[SupervisorSignals], Coroutine[Any, Any, None]]) -> None:
    signals = SupervisorSignals()
    await signals.run(run(signals), lambda: print("quotagate is stopping", flush=True))  # noqa: T201
    print("quotagate has stopped; its state is kept", flush=True)  # noqa: T201


async def _run(
    settings: Settings,
    read: Callable[[], Settings],
    directory: Path,
    listeners: Listeners,
    lock: int,
    options: tuple[str, ...],
    signals: SupervisorSignals,
) -> None:
    """Start everything and keep it running until cancelled; every child inherits the lock.

    Its contexts end in reverse: the API first, then the workers, which write its last rows, then the store.
    """
    async with contextlib.AsyncExitStack() as stack:
        env = {**os.environ, **pinned(settings), f"{PREFIX}HOME": str(directory)}
        fixed = list(FIXED)
        if settings.redis_url is None:
            embedded = embedded_store(directory, lock, settings.store_memory)
            store, env[f"{PREFIX}REDIS_URL"] = await stack.enter_async_context(embedded)
            store.keep()
            fixed += ["redis_url", "store_memory"]

        migrate = Child("migrate", quotagate("migrate", *options), env=env, pass_fds=(lock,))
        stack.push_async_callback(migrate.stop)
        await migrate.start()
        if await migrate.wait() != 0:
            raise StartError("the catalog could not be upgraded to the newest schema; see the log")

        workers = Child("workers", program("workers", *options), env=env, pass_fds=(lock,))
        stack.push_async_callback(workers.stop)
        arguments, inherited = (*listeners.arguments, *options), (*listeners.descriptors, lock)
        api = ApiProcesses(settings, arguments, env=env, fixed=fixed, pass_fds=inherited)
        stack.push_async_callback(lambda: api.stop(signals.stopped_by))
        await api.start()
        await workers.start()
        workers.keep()
        await api.become_ready()
        api.keep()
        print(_welcome(settings, directory), flush=True)  # noqa: T201

        await api.obey(signals.restart, lambda: check_envoy(read()), workers.restart)


def _welcome(settings: Settings, directory: Path) -> str:
    url = settings.base_url
    key = (
        f"$(cat {shlex.quote(str(directory / 'admin.key'))})"
        if settings.admin_key is None
        else f"${PREFIX}ADMIN_KEY"
    )
    envoy_line = (
        f"\nEnvoy's rate-limit service listens on port {settings.envoy_port}." if settings.envoy_port else ""
    )
    unknown = ", ".join(settings.unknown_variables)
    unknown_line = f"\nNothing reads {unknown}; the log says why." if unknown else ""
    return f"""quotagate is ready on {url}

Try this:
  # allow every user five new producer ids an hour
  curl -X PUT '{url}/v1/quotas/user=*' -H "Authorization: Bearer {key}" \\
       -H 'Content-Type: application/json' -d '{{"producer_ids_rate": 5}}'
  # ask whether alice may use these ids (a sixth would have to wait)
  curl '{url}/v1/decisions' -d '{{"principal": "alice", "usage": {{"producer_ids": [1, 2, 3, 4, 5]}}}}'
  # read the API reference
  {url}/docs

Ctrl-C stops it; its state stays in {directory}.{envoy_line}{unknown_line}"""
