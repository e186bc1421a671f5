"""The settings for volumes as rules, the same for every node and every observer."""

from __future__ import annotations

from app.domain.volumes import VolumeLimit, VolumeRules
from app.node.settings import Settings


def volume_rules(settings: Settings) -> VolumeRules:
    """Return the rules for volumes; an interval of 0 means no source."""
    interval_ms = round(settings.volume_check_interval.total_seconds() * 1000)
    return VolumeRules(
        source=settings.volume_source if interval_ms else None,
        limit=VolumeLimit(settings.volume_min_available_bytes, settings.volume_min_available_ratio),
        interval_ms=interval_ms,
        validity_ms=round(settings.volume_validity.total_seconds() * 1000),
        fallback=settings.volume_fallback_factor,
        excluded=frozenset(settings.volume_excluded_principals),
    )
