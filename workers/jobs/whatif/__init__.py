"""What-ifs: replays a log under other quotas, after the log has reproduced itself under its own.

``rows`` decodes the log into asks. Both replays go through all asks in the store's order, over all buckets
(``buckets``): ``reproduction`` by the quotas of the log's own verdicts, ``simulation`` by those of a file.
``what_if`` runs both, ``report`` writes what came of it, and ``job`` is the command line.
"""
