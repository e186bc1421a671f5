"""Records decisions, and packs them into batches of the decision log."""
