"""Kafka's own client as a child, driven line by line: `JavaClient` of the proxy's project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.kafka import maven
from tests.kafka_proxy import driven, proxy
from tests.kafka_proxy.driven import DrivenClient

JVM: Final = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


@contextmanager
def running(folder: Path, bootstrap: str, **properties: Any) -> Iterator[DrivenClient]:
    """A client with these properties; underscores in their names become dots."""
    proxy.jar()
    folder.mkdir(exist_ok=True)
    named = {name.replace("_", "."): value for name, value in properties.items()}
    written = {"security.protocol": "PLAINTEXT", "bootstrap.servers": bootstrap, **named}
    file = folder / "client.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in written.items()))
    target = proxy.PROJECT / "target"
    class_path = ("-cp", f"{target}/test-classes:{target}/lib/*")
    command = (maven.JAVA, *JVM, *class_path, "quotagate.kafka.proxy.JavaClient", file)
    with driven.running(folder, command) as client:
        yield client
