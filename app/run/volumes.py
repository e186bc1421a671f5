"""What the settings say of volumes, for every node and every observer alike."""

from __future__ import annotations

from app.domain.volumes import Limit, Rules
from app.run.settings import Settings


def volume_rules(settings: Settings) -> Rules:
    """What volumes are held to; an interval of nothing is no source."""
    interval_ms = round(settings.volume_check_interval.total_seconds() * 1000)
    return Rules(
        source=settings.volume_source if interval_ms else None,
        limit=Limit(settings.volume_min_available_bytes, settings.volume_min_available_ratio),
        interval_ms=interval_ms,
        validity_ms=round(settings.volume_validity.total_seconds() * 1000),
        fallback=settings.volume_fallback_factor,
        excluded=frozenset(settings.volume_excluded_principals),
    )
