"""An agent that pushes the disks of one Kafka broker to Quotagate. It needs Python 3.9 and no package."""
# ruff: noqa: INP001  an example is a file to read and run, not a package

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 10.0
"""The longest wait for a node."""
FIRST_PAUSE_S = 1.0
"""The pause after a failed push; it doubles with each further one, up to the interval."""
JITTER = 0.2
"""The part of each pause that is random, so that the agents of a cluster do not push at the same moment."""
KAFKAS_DIR = "/tmp/kafka-logs"  # noqa: S108  Kafka's own default
LOG = logging.getLogger("volume-agent")


class RefusedError(Exception):
    """The node refused the push, and will refuse the next one: somebody must correct something."""


class AwayError(Exception):
    """No node could answer, or only by an error of its own."""


def properties_of(text: str) -> dict[str, str]:
    r"""Return the properties of a Java properties file, such as Kafka's server.properties.

    >>> properties_of("# a comment\nnode.id=1\nlog.dirs = /a,\\\n   /b\nempty")
    {'node.id': '1', 'log.dirs': '/a,/b', 'empty': ''}
    """
    found = {}
    for line in map(str.strip, re.sub(r"\\\r?\n[ \t]*", "", text).splitlines()):
        if line and line[0] not in "#!":
            name, _, value = re.sub(r"\s*[=:\s]\s*", "=", line, count=1).partition("=")
            found[name] = re.sub(r"\\(.)", r"\1", value)
    return found


def broker_of(properties: dict[str, str]) -> str | None:
    """Return the id of the broker; None if the file does not say it."""
    return properties.get("node.id") or properties.get("broker.id")


def dirs_of(properties: dict[str, str]) -> list[str]:
    """Return the directories of the log, and of KRaft's metadata log, which Kafka does not report."""
    dirs = properties.get("log.dirs") or properties.get("log.dir") or KAFKAS_DIR
    listed = [*dirs.split(","), properties.get("metadata.log.dir", "")]
    return list(dict.fromkeys(filter(None, map(str.strip, listed))))


def volumes_of(broker: str, dirs: Sequence[str]) -> list[dict[str, object]]:
    """Return the volume of each directory; a size of None is unknown, which is neither 0 nor full."""
    volumes: list[dict[str, object]] = []
    for dir_ in dirs:
        total = available = None
        try:
            disk = shutil.disk_usage(dir_)
            total, available = disk.total, disk.free  # free for programs that are not root, as df shows it
        except OSError as error:
            LOG.warning("the size of %s is unknown: %s", dir_, error)
        volumes.append({"broker": broker, "dir": dir_, "total_bytes": total, "available_bytes": available})
    return volumes


def push(url: str, key: str, volumes: list[dict[str, object]]) -> float:
    """Push one observation, and return the throttle factor after it.

    Raises:
        RefusedError: the node refused the push.
        AwayError: no answer came, or the node cannot take the push now.
    """
    body = json.dumps({"volumes": volumes, "complete": False}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/volumes", body, headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return float(json.load(answer)["factor"])
    except urllib.error.HTTPError as error:
        with error:
            why = f"{error.code} {error.read(2000).decode(errors='replace')}"
        if error.code < 500 and error.code != 429:
            raise RefusedError(why) from None
        raise AwayError(why) from None
    except (OSError, http.client.HTTPException) as error:
        raise AwayError(f"no answer: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise AwayError(f"this is no answer of Quotagate: {error}") from None


class Agent:
    """Pushes the disks of one broker, again and again.

    Args:
        urls: of the nodes; a push goes to one, and to the next if that does not answer.
        interval_s: the time between pushes.
    """

    def __init__(
        self, urls: Sequence[str], key: str, broker: str, dirs: Sequence[str], interval_s: float
    ) -> None:
        self.urls = list(urls)
        self.stop = threading.Event()
        self._key = key
        self._broker = broker
        self._dirs = dirs
        self._interval_s = interval_s
        self._said: object = None
        """The status that was logged last."""

    def run(self) -> None:
        """Push until ``stop`` is set."""
        failures = 0
        while not self.stop.is_set():
            began = time.monotonic()
            try:
                self.once()
                failures = 0
            except RefusedError as error:  # trying again soon would change nothing
                self._say(str(error), f"the push is refused: {error}", logging.ERROR)
                failures = 0
            except AwayError:
                self._said = None
                failures += 1
            pause_s = self._interval_s
            if failures:
                pause_s = min(pause_s, FIRST_PAUSE_S * 2 ** min(failures - 1, 30))
            pause_s *= 1 - random.random() * JITTER  # noqa: S311
            self.stop.wait(max(began + pause_s - time.monotonic(), FIRST_PAUSE_S / 2))

    def once(self) -> None:
        """Push once, to the first node that answers.

        Raises:
            RefusedError: a node refused the push.
            AwayError: no node took the push.
        """
        volumes = volumes_of(self._broker, self._dirs)
        for _ in self.urls[:]:
            try:
                factor = push(self.urls[0], self._key, volumes)
            except AwayError as error:
                LOG.warning("%s: %s", self.urls[0], error)
                self.urls.append(self.urls.pop(0))
            else:
                self._say(factor, f"pushed {len(volumes)} volumes of broker {self._broker}: factor {factor}")
                return
        raise AwayError("no node took the push")

    def _say(self, status: object, text: str, level: int = logging.INFO) -> None:
        """Log a status that differs from the previous one."""
        if status != self._said:
            self._said = status
            LOG.log(level, text)


def main() -> None:
    """Read the options and push until a signal comes."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="QUOTAGATE_URL has the addresses of one node or of several, with commas between them; "
        "QUOTAGATE_KEY a key with the scope write.",
    )
    parser.add_argument("--properties", type=Path, help="the broker's server.properties")
    parser.add_argument("--broker", help="the broker's id; by default node.id or broker.id of the properties")
    parser.add_argument(
        "--dir", action="append", dest="dirs", help="a directory; may be repeated; by default log.dirs"
    )
    parser.add_argument("--interval", type=float, default=20.0, help="seconds between pushes (20)")
    parser.add_argument("--once", action="store_true", help="push once; exit code 1 if that fails")
    given = parser.parse_args()
    try:
        properties = properties_of(given.properties.read_text("utf-8")) if given.properties else {}
    except (OSError, ValueError) as error:
        parser.error(f"--properties: {error}")
    broker = given.broker or broker_of(properties)
    if not broker:
        parser.error("--broker: is needed, or --properties of a file with node.id or broker.id")
    if not given.dirs and not given.properties:
        parser.error("--dir: is needed, or --properties of a file with log.dirs")
    urls = [url.strip() for url in os.environ.get("QUOTAGATE_URL", "").split(",") if url.strip()]
    key = os.environ.get("QUOTAGATE_KEY", "").strip()
    if not urls or any(urllib.parse.urlsplit(url).scheme not in ("http", "https") for url in urls):
        parser.error("QUOTAGATE_URL: must be http:// or https:// and the address of a node")
    if not key:
        parser.error("QUOTAGATE_KEY: is needed: a key with the scope write")
    if given.interval < 1:
        parser.error("--interval: must be at least 1")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    agent = Agent(urls, key, broker, given.dirs or dirs_of(properties), given.interval)
    if given.once:
        try:
            agent.once()
        except (RefusedError, AwayError) as error:
            sys.exit(f"volume-agent: {error}")
        return
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: agent.stop.set())
    agent.run()


if __name__ == "__main__":
    main()
