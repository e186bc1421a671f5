"""The audit: proves from the decision log that the limits held.

Each bucket is replayed on its own, in the store's order (``judge``): the logged charges are applied with the
domain's arithmetic, and every verdict is computed again and compared (``levels`` for rates and token buckets,
``ids`` for producer ids, which are kept in exact sets instead of a filter). The sum admitted in any window is
compared with the stated bound (``admitted_amounts``).

Other checks look at the log itself: that a row does not contradict itself (``contradictions``), that batches
are complete and unchanged (``batches``), that no batches or charges are missing (``missing``), and that nodes
used the limits in force (``stale_limits``).

``report`` runs all of this over a log and writes tables and a page; ``job`` is its command line.
"""
