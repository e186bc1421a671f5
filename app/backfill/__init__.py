"""Loading the assertions of a backfill job into a running store.

A job (``workers/jobs/backfill``) writes a folder of assertions (``app/domain/assertion.py``).

- ``assertions``: opens and checks such a folder, and reads it in parts
- ``load``: finds the quota of each assertion and loads them at a bounded rate, with retries
- ``log``: writes the load to the decision log, so that audits know of it
- ``errors``: the errors of a load

The store's side is ``app/store/loading.py``; the command is ``app/run/commands/backfill.py``.
"""
