"""Renders the Helm chart with helm itself, and finds its parts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.files import ROOT
from tests.tools import need

KUBERNETES: Final = ROOT / "examples/kubernetes"
CHART: Final = KUBERNETES / "quotagate"
OLDEST, NEWEST = "1.27.0", "1.37.0"
"""The versions of Kubernetes that the chart is checked for."""
SOURCE: Final = "`make test-all` builds it where there is Go"

Values = Mapping[str, Any]
Manifest = dict[str, Any]

EVERYTHING: Final[Values] = {
    "fullnameOverride": "gate",
    "image": {"digest": f"sha256:{'0' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "config": {"QUOTAGATE_OPEN_TO": "10.0.0.0/8", "QUOTAGATE_PROCESSES": "auto"},
    "extraEnv": [{"name": "AWS_REGION", "value": "eu-west-1"}],
    "extraVolumes": [{"name": "ca", "secret": {"secretName": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/quotagate/ca", "readOnly": True}],
    "tls": {"secretName": "gate-tls"},
    "serviceAccount": {"annotations": {"cloud": "role"}},
    "api": {
        "podAnnotations": {"team": "gate"},
        "nodeSelector": {"disk": "none"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
    },
    "service": {"type": "LoadBalancer", "annotations": {"cloud": "internal"}},
    "envoy": {"enabled": True, "mapping": "gate-envoy"},
    "podDisruptionBudget": {"maxUnavailable": "25%"},
    "autoscaling": {"enabled": True},
    "workers": {
        "nodeSelector": {"disk": "large"},
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"a": "b"},
    },
    "log": {"level": "all", "claim": {"storageClassName": "fast"}},
    "audit": {"enabled": True},
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "key": {"name": "scrape"},
        "tlsConfig": {"serverName": "gate"},
    },
    "networkPolicy": {"enabled": True, "from": [{"podSelector": {}}], "egress": [{}]},
}
"""Values that use every part of the chart."""


def helm(*words: str | Path, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with values on its standard input."""
    command: list[str | Path] = [need("helm", SOURCE), *words, "--values", "-"]
    given = json.dumps(values or {})
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)


def refusal(values: Values) -> str:
    """Why the chart is not rendered with these values; empty if it is."""
    ran = helm("template", "gate", CHART, "--kube-version", NEWEST, values=values)
    return ran.stderr if ran.returncode else ""


def rendered(values: Values | None = None) -> list[Manifest]:
    """The manifests that the chart makes of these values, in the namespace `prod`."""
    found: list[Manifest] = [each for each in yaml.safe_load_all(text(json.dumps(values or {}))) if each]
    return found


@cache
def text(values: str) -> str:
    """The manifests as one YAML text; `values` is JSON."""
    words = ("template", "gate", CHART, "--kube-version", NEWEST, "--namespace", "prod")
    ran = helm(*words, values=json.loads(values))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def one(kind: str, manifests: list[Manifest], ending: str = "") -> Manifest:
    """The manifest of this kind whose name has this ending."""
    (found,) = (
        each for each in manifests if each["kind"] == kind and each["metadata"]["name"].endswith(ending)
    )
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pod templates, by component."""
    found = {}
    for each in manifests:
        inner = each["spec"]["jobTemplate"] if each["kind"] == "CronJob" else each
        if template := inner.get("spec", {}).get("template"):
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
    return found


def container(pod: Manifest) -> Manifest:
    """The only container of a pod template."""
    (found,) = pod["spec"]["containers"]
    assert "initContainers" not in pod["spec"]
    return dict(found)


def environment(pod: Manifest, secrets: Mapping[str, str]) -> dict[str, str]:
    """The variables of a pod's container; `secrets` has the values of the Secret by key."""
    found = {}
    for variable in container(pod)["env"]:
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference.keys() == {"name", "key"}, "a missing secret must not go unnoticed"
            found[variable["name"]] = secrets[reference["key"]]
    return found
