"""The Redis store: one function decides, over one connection, with one round trip for all asks of a call."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from socket import gaierror
from ssl import SSLError
from time import monotonic
from typing import Any, ClassVar, Final, TypeVar, cast

import redis
from redis.asyncio import Redis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,  # noqa: A004  redis-py's own name; the built-in one is OSError's
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,  # noqa: A004
    TryAgainError,
)
from redis.sentinel import MasterNotFoundError

from app.node.shortage import Resource, causes, is_out_of_descriptors, shortage_of
from app.store.client import Reserve, blocking_client_of, client_of, dial, is_clustered
from app.store.connection import GREET_WITHIN_S, Command, Connection, Done
from app.store.encoding import ORDER_STEP, answers_of, encode_call, encode_plans, read_reply
from app.store.keys import BIRTH_KEY, ORDER_KEY, PROBE_KEY, RESETS_KEY, reset_key
from app.store.library import Library, MissingFunctionError, Run, call_function, keep_only_used
from app.store.port import (
    NONE_KNOWN,
    Answer,
    AnswersCallback,
    Fault,
    LiveLayer,
    Mark,
    Memory,
    Plan,
    ShortageError,
    StoreError,
    as_shortage,
)
from app.store.rights import RIGHTS, RULE_IS_IN, Examination
from app.store.script import FORGET, MARK, READ_LAYERS, SCRIPT, text

T = TypeVar("T")

OLDEST: Final = (7, 0)
"""The oldest supported Redis; Valkey 7.2 and later report Redis 7.2."""

EXAMINE_WITHIN_S: Final = 0.5
"""The timeout of each command of an examination. It is short, so that the store's return is noticed soon."""

PROBE: Final = text("probe")
"""Checks that a script may write; leaves nothing, and works in a full store like the script that decides."""

_BY_TYPE: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...]] = (
    (MasterDownError, "master_down"),  # a subclass of the next
    (ClusterDownError, "cluster_down"),
    (TryAgainError, "slot_moving"),
    ((MovedError, AskError), "slot_moved"),
    (RedisClusterException, "cluster_down"),
    (OutOfMemoryError, "out_of_memory"),
    (ReadOnlyError, "read_only"),
    (BusyLoadingError, "loading"),
    (NoPermissionError, "permission"),
    (AuthenticationError, "authentication"),
    (AuthorizationError, "authentication"),
    (TimeoutError, "timeout"),
    (ConnectionError, "connection"),
    (OSError, "connection"),
)
_BY_TEXT: Final = {
    "BUSY ": "busy",
    "No space left on device": "disk_full",  # also MISCONF, so it comes before
    "Disk quota exceeded": "disk_full",
    "MISCONF ": "misconfigured",
    "NOREPLICAS ": "no_replicas",
    "unknown command": "scripting",
    "executing the script can't run": "permission",  # Redis
    "ACL failure in script": "permission",  # Valkey
}
"""Errors that redis-py has no class for, by a part of their text."""

_HIDING: Final = (gaierror, SSLError, MasterNotFoundError)
"""Errors that hide whether a file could not be opened, or a sentinel could not be connected to."""


class RedisStore:
    """A store in Valkey 7.2 or later or Redis 7 or later.

    Args:
        url: of one server, or of sentinels that know the primary (``app.node.store_url``).
        caller_clock: use the asks' ``at_ms`` as the time, not the store's clock.
        sequential: add delays up as KIP-124 does.
        logged: for the decision log, number the calls and return the outcomes of ids.
        brief: get the answers to ordinary admissions as two numbers of each quota.
        max_ids: the most ids remembered for one principal.
        timeout_s: how long a removal may take; a decision takes until its caller gives up (``give_up``).
        script: another text in place of the script, for the tests that plant faults in it.
        reserve: sockets and threads for its connections; by default its own.
    """

    CLUSTERED: ClassVar[bool] = False
    """Whether it is a part of a cluster."""

    def __init__(
        self,
        url: str,
        *,
        caller_clock: bool = False,
        sequential: bool = False,
        logged: bool = False,
        brief: bool = True,
        max_ids: int = 1_000_000,
        timeout_s: float = 5.0,
        script: str = SCRIPT,
        reserve: Reserve | None = None,
    ) -> None:
        self._client = client_of(url, timeout_s)
        self._own_reserve = Reserve.of(url, threads=1) if reserve is None else None
        self._sockets, self._threads = cast("Reserve", reserve or self._own_reserve)
        self._examiner = blocking_client_of(url, EXAMINE_WITHIN_S, self._sockets, self._hear)
        """A client with its own connections, which neither waits for calls nor tests an old connection."""
        self._calls: Connection | None = None
        self._short: ShortageError | None = None
        """Why there is no connection, if this process is short of something."""
        self._lost_at: float | None = None
        """When calls began to wait for another connection, by the loop's clock; None while none waits."""
        self._heard_at = 0.0
        """When the store last replied to an examination or a greeting, or its silence began to count, by the
        same clock."""
        self._waiting: list[tuple[Command, Done]] = []
        """The commands that wait, to be sent on the next connection."""
        self.lost: Callable[[StoreError], None] = lambda _error: None
        self._library = Library.of(script, beyond_maxmemory=True)
        self._call = encode_call(
            caller_clock=caller_clock, sequential=sequential, logged=logged, max_ids=max_ids, brief=brief
        )
        self._logged = logged
        self._rights = Examination(logged=logged, clustered=self.CLUSTERED)
        self.now_ms = 0
        """The store's time at the last call, under the store's clock."""
        self.memory: Memory | None = None
        """The memory at the last examination; None if unknown."""

    def ask(self, plans: Sequence[Plan], done: AnswersCallback) -> None:
        """Decide plans in order, each atomically, in one round trip on the open connection.

        Args:
            done: called with the answers of the first plans (at least one) or with an error, mostly a
                ``StoreError``. A call that has written much decides no further ask, so that it does not block
                the store for long: send the rest again. A failed call may still be counted.
        """
        call = self._command(*encode_plans(plans), ORDER_KEY)

        def came(reply: Any) -> None:
            if isinstance(reply, MissingFunctionError):
                self._send(("FUNCTION", "LOAD", "REPLACE", self._library.code), loaded)
            else:
                done(self._answers(reply, plans))

        def loaded(reply: Any) -> None:
            if isinstance(reply, Exception):
                done(reply)
            else:
                self._send(call, lambda again: done(self._answers(again, plans)))

        self._send(call, came)

    def _command(self, keys: list[bytes], arguments: list[bytes], order_key: bytes) -> Command:
        """The command that decides asks; adds the key of the order if decisions are logged."""
        if self._logged:
            keys.append(order_key)
        return ("FCALL", self._library.name, len(keys), *keys, self._call, *arguments)

    def _answers(self, reply: Any, plans: Sequence[Plan]) -> list[Answer] | Exception:
        if isinstance(reply, Exception):
            return reply
        try:
            answers = read_reply(reply, plans, logged=self._logged)
        except Exception as error:  # noqa: BLE001  a reply of another script; the caller names it
            return error
        self.now_ms = reply[0]
        return answers

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        """Decide plans as ``ask`` does, and wait for the answers.

        Raises:
            StoreError: the store did not answer, or answered with an error; a late call may still be counted.
        """
        return await answers_of(self, plans)

    def silent_since(self) -> float | None:
        """When the store's silence began, by the loop's clock; None if it is not silent."""
        if self._calls is not None:
            return self._calls.silent_since()
        return None if self._lost_at is None else max(self._lost_at, self._heard_at)

    def give_up(self, error: StoreError) -> None:
        """Fail all calls that wait for a reply or for a connection, and close the connection."""
        if self._calls is not None:
            self._calls.close(error)
            self._calls = None
        self._end_wait()

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        """Remove the buckets of these keys in one step; if that fails, either all or none are removed.

        Args:
            known_ms: for buckets that nodes remember, how long their knowledge is valid.

        Returns:
            the place of the removal in the order of the decision log; None if nothing is logged.

        Raises:
            StoreError: no answer, or an error as the answer; a late call may still remove them.
        """
        if not keys:
            return None
        # One script takes the numbers and removes the buckets, so that the order is right.
        order_key, resets_key = self._counted_keys(keys[0])
        counted = [order_key] if self._logged else []
        order = await run_script(
            self._client,
            FORGET,
            [*keys, *map(reset_key, known_ms), resets_key, *counted],
            len(keys),
            *known_ms.values(),
        )
        return int(order) * ORDER_STEP or None

    async def live_layers(self, key: bytes, now_ms: int, ttl_ms: int) -> list[LiveLayer]:
        """Read the live layers of a bucket of producer ids, oldest first; for operators, not for decisions.

        Args:
            ttl_ms: how long a layer lives.

        Raises:
            StoreError: no answer, or an error as the answer.
        """
        return [
            LiveLayer(*layer) for layer in await run_script(self._client, READ_LAYERS, [key], now_ms, ttl_ms)
        ]

    async def mark(self) -> Mark:
        """Read the values by which a node detects a loss or a reset; a failover or a start changes the birth.

        Raises:
            StoreError: no answer, or an error as the answer.
        """
        (seconds, micros), birth, resets = await run_script(
            self._client, MARK, (BIRTH_KEY, RESETS_KEY), secrets.token_hex(16)
        )
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        return Mark(now_ms, birth, int(resets))

    async def examine(self) -> tuple[Fault, ...]:
        """Check that the store decides and takes writes, and connect for calls if necessary.

        A thread does it, since it may block. So a busy event loop does not look like a slow store.

        Returns:
            the misconfigurations that were found, although the store works.

        Raises:
            ShortageError: this process is short of something, so the store could not be examined.
            StoreError: it does not work, or it is a cluster: the keys of an ask may be in several slots.
        """
        loop = asyncio.get_running_loop()
        try:
            faults = await loop.run_in_executor(self._threads, self._examine)
            await self.connect()
        except Exception as error:
            self._short = as_shortage(error)
            if self._short is None:
                raise
            if not self._is_connected:
                self._end_wait()
            raise self._short from error
        finally:
            self._sockets.refill()
        return faults

    async def connect(self) -> None:
        """Connect for calls, unless connected.

        Raises:
            StoreError: there is no such store, or it refused the greeting.
        """
        if self._is_connected:
            return
        loop = asyncio.get_running_loop()
        try:
            unused = await loop.run_in_executor(self._threads, dial, self._examiner, GREET_WITHIN_S)
            self._hear()
            self._calls = await Connection.open(unused, self._was_lost)
        except (RedisError, OSError) as error:
            raise failure(error) from error
        self._short = None
        self._end_wait()

    @property
    def _is_connected(self) -> bool:
        return self._calls is not None and self._calls.is_open

    def _examine(self) -> tuple[Fault, ...]:
        """Examine the store, in a thread that may block."""
        self._hear()  # the time before was this node's
        faults = self._faults()
        run_here = partial(_run_blocking, self._examiner)
        lacking = _result_of(self._lacking(run_here))
        order, probe = self._examined_keys()
        try:
            _result_of(call_function(run_here, self._library, [order] if self._logged else [], [self._call]))
            _result_of(run_here("EVAL", PROBE, 1, probe))
        except StoreError as error:
            if lacking and error.reason == "permission":
                raise StoreError("permission", lacking) from error
            raise
        _result_of(keep_only_used(run_here, self._library))
        return (*faults, Fault("missing_right", lacking)) if lacking else faults

    async def _lacking(self, run: Run) -> str:
        """Name the missing rights of the store's user; empty if none, or if the server cannot check them.

        Raises:
            StoreError: no answer, or scripts are not allowed.
        """
        try:
            return self._rights.missing(await run("EVAL", RIGHTS, 0, *self._rights.asked))
        except StoreError as error:
            if error.reason == "permission":
                raise StoreError("permission", f"the store's user may not run EVAL{RULE_IS_IN}") from error
            if error.reason != "response":
                raise
            return ""

    async def close(self) -> None:
        """Close the connections."""
        self.give_up(StoreError("connection", "closed"))
        await self._client.aclose()
        self._examiner.close()
        if self._own_reserve is not None:
            self._own_reserve.close()

    def _send(self, command: Command, done: Done) -> None:
        """Send one command on the connection for calls.

        Args:
            done: called with the reply, or with the ``StoreError`` in its place, and never before this
                returns; a late command may still be carried out.
        """
        calls = self._calls
        if calls is None and self._lost_at is not None:
            self._waiting.append((command, done))
            return
        if calls is not None and calls.is_open:
            calls.send(command, partial(self._received, calls, done))
        else:
            error = self._short or ConnectionError("there is no connection to the store")
            asyncio.get_running_loop().call_soon(self._received, calls, done, error)

    def _received(self, calls: Connection | None, done: Done, reply: Any) -> None:
        if isinstance(reply, Exception):
            failed = reply if isinstance(reply, StoreError) else failure(reply)
            if calls is not None and calls is self._calls and not isinstance(failed, MissingFunctionError):
                # After a failover the address may point to another store than this connection does.
                self.give_up(failed)
            reply = failed
        done(reply)

    def _was_lost(self, error: Exception) -> None:
        """Let the next calls wait for another connection; they have sent nothing yet."""
        self._calls = None
        failed = failure(error)
        if isinstance(failed, ShortageError):  # the store is not silent: it is not asked
            self._short = ShortageError(failed.resource, str(error))
        else:
            self._lost_at = asyncio.get_running_loop().time()
        self.lost(failed)

    def _end_wait(self) -> None:
        """Send the commands that waited for a connection; without one, they fail."""
        self._lost_at = None
        waiting, self._waiting = self._waiting, []
        for command, done in waiting:
            self._send(command, done)

    def _hear(self) -> None:
        """Keep the time of a reply to an examination or a greeting."""
        self._heard_at = monotonic()

    def _faults(self) -> tuple[Fault, ...]:
        try:
            server = self._examiner.info("everything")
        except NoPermissionError:
            return (Fault("unchecked", "it does not allow INFO, so its version and settings are not known"),)
        except (RedisError, OSError) as error:
            self._examiner.connection_pool.disconnect()
            raise failure(error) from error
        self._check_kind(server)
        self.memory = Memory(int(server.get("used_memory", 0)), int(server.get("maxmemory", 0)))
        return tuple(_faults(server, self.memory))

    def _examined_keys(self) -> tuple[bytes, bytes]:
        """The keys that an examination uses: of the order, and of the probe."""
        return ORDER_KEY, PROBE_KEY

    def _counted_keys(self, _bucket: bytes) -> tuple[bytes, bytes]:
        """The keys of the order and of the last reset that go with a bucket."""
        return ORDER_KEY, RESETS_KEY

    def _check_kind(self, server: Mapping[str, Any]) -> None:
        if server.get("cluster_enabled"):
            raise StoreError("cluster", "this is a cluster: give its URL as redis+cluster://HOST:PORT,...")


async def run(client: Redis, *command: str | bytes | int) -> Any:
    """The reply to one command.

    Raises:
        StoreError: no reply, or an error as the reply; a late command may still be carried out.
        MissingFunctionError: of FCALL; nothing was done.
    """
    try:
        return await cast("Any", client).execute_command(*command)
    except (RedisError, RedisClusterException, OSError) as error:
        failed = failure(error)
        if not (isinstance(failed, MissingFunctionError) or is_clustered(client)):
            # The next call connects again: after a failover the address may point to another store.
            # The client of a cluster has no pool, and connects anew by itself.
            await client.connection_pool.disconnect(inuse_connections=False)
        raise failed from error


async def run_script(
    client: Redis, script: str, keys: Sequence[str | bytes], *arguments: str | bytes | int
) -> Any:
    """The reply of a small script, whose file in ``lua/`` describes its keys and arguments.

    Its text is sent with EVAL each time: such scripts are short and seldom called.

    Raises:
        StoreError: no reply, or an error as the reply; a late call may still be carried out.
    """
    return await run(client, "EVAL", script, len(keys), *keys, *arguments)


async def _run_blocking(client: redis.Redis, *command: str | bytes | int) -> Any:
    """The reply to one command, without an event loop: the thread blocks.

    Raises:
        StoreError: no reply, or an error as the reply; a late command may still be carried out.
    """
    try:
        return cast("Any", client).execute_command(*command)
    except (RedisError, OSError) as error:
        failed = failure(error)
        if not isinstance(failed, MissingFunctionError):
            client.connection_pool.disconnect()
        raise failed from error


def failure(error: Exception) -> StoreError:
    """Name a failure of the store in one word. This is the only list of the words (``docs/failures.md``)."""
    if isinstance(error, StoreError):
        return error
    if resource := _shortage_behind(error):
        return ShortageError(resource, str(error))
    if isinstance(error.__cause__, RedisError):
        error = error.__cause__  # redis-py reports a refused greeting as a lost connection
    text = str(error)
    if MissingFunctionError.TEXT in text:
        return MissingFunctionError("scripting", text)
    by_type = (reason for type_, reason in _BY_TYPE if isinstance(error, type_))
    by_text = (reason for part, reason in _BY_TEXT.items() if part in text)
    return StoreError(next(chain(by_type, by_text), "response"), text)


def _shortage_behind(error: Exception) -> Resource | None:
    """Return the resource that was short, even if the error hides it."""
    resource = shortage_of(error)
    if resource is None and any(isinstance(cause, _HIDING) for cause in causes(error)):
        return "descriptors" if is_out_of_descriptors() else None
    return resource


def _result_of(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that blocks its thread wherever it could wait, so it needs no event loop."""
    try:
        work.send(None)
    except StopIteration as ended:
        found: T = ended.value
        return found
    raise RuntimeError("the work waits for an event loop")


def _faults(server: Mapping[str, Any], memory: Memory) -> Iterator[Fault]:
    """The misconfigurations that INFO shows."""
    version = str(server.get("redis_version", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        yield Fault("version", f"Redis {version or '?'} is not {'.'.join(map(str, OLDEST))} or later")
    policy = server.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield Fault("maxmemory_policy", f"{policy} evicts buckets, which are then forgotten; set noeviction")
    if not memory.most:
        yield Fault("maxmemory", "it has no maxmemory, so it may take all the memory of its host; set one")
    if memory.is_full:
        yield Fault("full", f"{memory.used:,} of {memory.most:,} bytes are used; it takes no new bucket")
