"""How to connect to a node: idle connections end early, and nodes on this machine need no proxy."""

from __future__ import annotations

import ssl
from ipaddress import IPv6Address, ip_address
from typing import Final, TypedDict

import httpx

LIMITS: Final = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=1.0)
"""Idle connections end before a stopping node ends them (QUOTAGATE_DRAIN_MS) while an ask is on its way."""


class Connecting(TypedDict, total=False):
    """Arguments of an httpx client."""

    limits: httpx.Limits
    trust_env: bool
    verify: ssl.SSLContext


def proxies_for(url: str) -> Connecting:
    """Return how to connect to a URL: a remote proxy cannot reach this machine, and would see the key."""
    # Make the context first: the environment may still name trusted certificates (SSL_CERT_FILE).
    made = Connecting(limits=LIMITS, verify=httpx.create_ssl_context())
    if is_here(url):
        made["trust_env"] = False
    return made


def is_here(url: str) -> bool:
    """Whether a URL leads to this machine's loopback."""
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
