"""Alembic's migrations of the catalog; `app.catalog.schema` runs them."""
