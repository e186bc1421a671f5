"""The audit: proves from the decision log that the limits held.

Each bucket is replayed on its own, in the store's order (``judge``): the logged charges are applied with the
domain's arithmetic, and every verdict is computed again and compared (``levels`` for rates and token buckets,
``ids`` for producer ids, which are kept in exact sets instead of a filter). The sum admitted in any window is
compared with the stated bound (``admitted_amounts``).

Honest buckets and rows need no explanation: ``sieve`` and ``row_rules`` confirm them over plain columns, and
leave any other to the judge, and to the rules of ``contradictions``. Rows that no node can have written are
findings by themselves (``possible``).

Other checks look at the log itself: that batches are complete and unchanged (``workers.jobs.batches``), that
charges without a row are explained (``replay``), and that nodes used the limits in force (``stale_limits``).

``scan`` and ``replay`` are the two stages, ``report`` runs them over a log and writes tables and a page, and
``job`` is the command line.
"""
