"""`quotagate top` at a terminal, asking a real node."""

from __future__ import annotations

import signal
from collections import Counter

from tests.service import eventually, running
from tests.terminals import ALTERNATE, ORDINARY, terminal


def test_screen_follows_the_deployment_until_ctrl_c() -> None:
    with running() as node, terminal(node, "top") as shown:
        node.put("user=alice", request_rate={"limit": 1e-6, "algorithm": "token_bucket", "burst": 10})
        eventually(lambda: shown.shows(r"delay +\S+ +0 "))
        asks = [{"principal": name, "usage": {"requests": 1}} for name in (*30 * ["nobody"], *20 * ["alice"])]
        given = Counter(each["decision"] for each in node.batch(asks))
        counted = (
            rf"admit +\S+ +{given['admit']} .*[▁▂▃▄▅▆▇█](?s:.*)delay +\S+ +{given['delay']} "
            r"(?s:.*)user=alice +request_rate "
        )
        eventually(lambda: shown.shows(counted))
        shown.process.send_signal(signal.SIGINT)
        assert shown.process.wait(60) == 0
        eventually(lambda: ORDINARY in shown.said)
        assert shown.said.count(ALTERNATE) == 1
        assert "Abort" not in shown.said
        assert "Traceback" not in shown.said


def test_node_that_ends_is_an_error_on_the_ordinary_screen() -> None:
    with running() as node, terminal(node, "top") as shown:
        eventually(lambda: shown.shows("THROTTLE FACTOR"))
        node.stop()
        assert shown.process.wait(60) == 1
        eventually(lambda: f"quotagate: {node.url}/v1/overview" in shown.said.partition(ORDINARY)[2])
