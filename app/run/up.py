"""The supervisor of `quotagate up`: starts and stops store, migrations, API and workers in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from app.node import home
from app.node.children import Child, stop_event
from app.node.command_lines import program, quotagate
from app.node.errors import StartError
from app.node.settings import PREFIX, Settings
from app.run.embedded import READY_WITHIN_S, embedded_store, until
from app.run.serve import FINISH_WITHIN_S, check_envoy, listen, print_key

if TYPE_CHECKING:
    import httpx

log = structlog.get_logger("quotagate.up")


def up(settings: Settings, *, options: tuple[str, ...] = ()) -> None:
    """Run everything until SIGINT or SIGTERM; pass ``options`` to the commands of the children."""
    check_envoy(settings)
    directory = home.make(settings.home)
    with contextlib.ExitStack() as held:
        held.callback(os.close, home.lock(directory))
        children = home.lock_of_children(directory)
        held.callback(os.close, children)
        home.restrict_access(directory)
        if settings.admin_key is None:
            key, made = home.admin_key(directory)
            if made:
                print_key(settings, key)
        listener = held.enter_context(listen(settings))
        asyncio.run(_supervise(settings, directory, listener, children, options))


async def _supervise(
    settings: Settings, directory: Path, listener: socket.socket, lock: int, options: tuple[str, ...]
) -> None:
    stopping = stop_event()
    work = asyncio.create_task(_run(settings, directory, listener, lock, options))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if work.done():
        return await work
    print("quotagate is stopping", flush=True)  # noqa: T201
    work.cancel()  # leaves its contexts: stops what was started last first
    with contextlib.suppress(asyncio.CancelledError):
        await work
    print("quotagate has stopped; its state is kept", flush=True)  # noqa: T201
    return None


async def _run(
    settings: Settings, directory: Path, listener: socket.socket, lock: int, options: tuple[str, ...]
) -> None:
    """Start everything and keep it running until cancelled; every child inherits the lock."""
    async with contextlib.AsyncExitStack() as stack:
        env = {
            **os.environ,
            f"{PREFIX}HOME": str(directory),
            f"{PREFIX}DATABASE_URL": settings.catalog_url,
        }
        if settings.redis_url is None:
            embedded = embedded_store(directory, lock, settings.store_memory)
            store, env[f"{PREFIX}REDIS_URL"] = await stack.enter_async_context(embedded)
            store.keep()

        migrate = Child("migrate", quotagate("migrate", *options), env=env, pass_fds=(lock,))
        stack.push_async_callback(migrate.stop)
        await migrate.start()
        if await migrate.wait() != 0:
            raise StartError("the catalog could not be upgraded to the newest schema; see the log")

        fd = listener.fileno()
        api = Child(
            "api",
            quotagate("serve", "--fd", str(fd), *options),
            env=env,
            pass_fds=(fd, lock),
            stop_within_s=FINISH_WITHIN_S + 10,
        )
        stack.push_async_callback(api.stop)
        await api.start()
        workers = Child("workers", program("workers", *options), env=env, pass_fds=(lock,))
        stack.push_async_callback(workers.stop)
        await workers.start()
        workers.keep()
        import httpx  # while the API starts

        late = f"the API was not ready within {READY_WITHIN_S:.0f} s; see the log"
        async with httpx.AsyncClient(verify=_tls(settings), trust_env=False, timeout=2) as client:
            await until(partial(_is_ready, client, settings), api, 0.05, late)
        api.keep()
        print(_welcome(settings, directory), flush=True)  # noqa: T201
        await asyncio.Event().wait()


def _tls(settings: Settings) -> ssl.SSLContext | bool:
    """Return how to call our own API: its certificate may have another name, and be of another CA."""
    if not (settings.tls_cert and settings.tls_key):
        return False  # and no CA is read, which takes longer than the call
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


async def _is_ready(client: httpx.AsyncClient, settings: Settings) -> bool:
    import httpx

    try:
        return (await client.get(f"{settings.base_url}/health/ready")).is_success
    except httpx.ReadError:
        # A refused handshake, possible with a client CA, shows that the API is running.
        return settings.tls_client_ca is not None
    except httpx.HTTPError:
        return False


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
    return f"""quotagate is ready on {url}

Try this:
  # allow every user five new producer ids an hour
  curl -X PUT '{url}/v1/quotas/user=*' -H "Authorization: Bearer {key}" \\
       -H 'Content-Type: application/json' -d '{{"producer_ids_rate": 5}}'
  # ask whether alice may use these ids (a sixth would have to wait)
  curl '{url}/v1/decisions' -d '{{"principal": "alice", "usage": {{"producer_ids": [1, 2, 3, 4, 5]}}}}'
  # read the API reference
  {url}/docs

Ctrl-C stops it; its state stays in {directory}.{envoy_line}"""
