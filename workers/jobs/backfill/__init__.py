"""The job `backfill`: the content that every bucket should have, from the log or from a foreign history.

- ``job``: the arguments
- ``logged``: from the decision log
- ``foreign``: from a foreign history, whose files ``history_files`` finds, ``parquet_history`` and
  ``json_history`` read, and ``uses`` checks
- ``bucket_state``: one bucket, replayed
- ``assertions``: the result as a folder
"""
