"""The one shell around the domain: an ask becomes a plan, one round trip, and a decision."""
