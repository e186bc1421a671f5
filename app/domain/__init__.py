"""The rules of Quotagate: pure functions and values, without a clock and without I/O.

This package imports only the standard library and mmh3. Time is always an argument, in integer milliseconds.

Glossary
========

"Elsewhere" gives the words that other systems use: Kafka, Envoy (its rate limit service) and the literature
on token buckets (TB) and Bloom filters (BF).

Questions and answers
---------------------

- *principal*: the identity that the work is for, as authenticated by the caller. Elsewhere: user (Kafka).
- *ask*: one question: may this work go ahead? It names a principal, a client, an address and so on, and the
  usage. Elsewhere: ``RateLimitRequest`` (Envoy); an arriving packet (TB).
- *usage*: the amounts that an ask wants to spend, by usage field, such as ``{"requests": 1}``. Elsewhere: the
  recorded value (Kafka), ``hits_addend`` (Envoy), cost or packet size (TB).
- *verdict*: the answer of one quota, as if it were the only one. Elsewhere: ``DescriptorStatus`` (Envoy).
- *decision*: the whole answer, combined from all verdicts: admit, delay, throttle or reject. Elsewhere: the
  throttle time (Kafka), ``overall_code`` OK or OVER_LIMIT (Envoy), conforming or not (TB).
- *mode*: the effect of an ask on its buckets. ``admit`` checks and charges. ``peek`` checks and writes
  nothing. ``record`` charges work that is already done and never refuses. ``refund`` gives usage back.
  Elsewhere: ``record`` and ``unrecord`` of a quota sensor (Kafka), ``hits_addend: 0`` for peek (Envoy).
- *charge*: to write usage into a bucket; also the usage that one ask writes into one bucket.
  Elsewhere: record (Kafka), increment or hit (Envoy), take or consume tokens (TB).
- *throttled*: answered with delay or throttle; ``throttle_ms`` is the wait.
- *kept answer*: an answer that charged something and is kept for 60 s, so that a retry with the same ``id``
  gets it again and charges nothing. Elsewhere: the response stored under an idempotency key.

Quotas
------

- *entity*: a user, client-id, address, broker or listener, or a pair, on which quotas are set, such as
  ``user=alice,client-id=etl``; a name of ``*`` is the default. Elsewhere: client quota entity,
  ``<default>`` (Kafka), descriptor (Envoy).
- *quota key*: the kind of limit, such as ``request_rate``; the table is ``app.domain.quota.KEYS``.
  Elsewhere: the quota's config name or type (Kafka).
- *limit*: the number that a quota sets. 0 rejects every usage above 0; no limit means unlimited. Elsewhere:
  bound (Kafka), ``requests_per_unit`` (Envoy), rate or committed information rate (TB).
- *enforcement*: the treatment of usage above a quota's limit. ``deny`` refuses the work and charges nothing.
  ``delay`` lets it go ahead, charges it, and holds the answer. Elsewhere: strict and permissive quotas
  (Kafka, KIP-599); policing and shaping (TB).
- *shadow*: a quota that charges and reports but never changes a decision. Elsewhere: ``shadow_mode`` (Envoy).
- *ladder*: the entities whose quota may apply to an ask, most specific first; the first that has a quota
  decides. Each of its entities is a *rung*. Elsewhere: quota precedence (Kafka), nested descriptors (Envoy).
- *bucket*: the counter that asks are charged to. Elsewhere: sensor (Kafka), counter or cache key (Envoy).
- *identity* and *epoch*: the fields of a quota whose change resets its bucket, and the catalog version of
  the last such change.

Rates and tokens
----------------

- *sample*: one slice of a sampled rate: a sum, when it began, and its last event. Elsewhere: sample, though
  Kafka's ``quota.window.size.seconds`` and ``quota.window.num`` call it a window.
- *window*: the whole span that is measured, never one sample. Elsewhere: the samples together (Kafka), unit
  (Envoy, whose window is fixed and not sliding).
- *debt*: how far a bucket's tokens are below 0, because delayed or recorded work is charged in any case. It
  has a longest duration; debt beyond that is *forgiven*. Elsewhere: negative tokens (Kafka), deficit (TB).
- *throttle factor*: a number from 0 to 1 that scales produce-byte limits while a volume runs out of space.
  Elsewhere: throttle factor (Strimzi's quota plugin).
- *suspended*: of an ask to produce: it must wait, uncharged, because the throttle factor is 0.

Leases
------

- *lease*: units that a caller takes from its buckets for a short time, to decide locally which work may
  spend them. Elsewhere: assigned quota (Envoy's RLQS), lease (Doorman). A worker's lease differs: it elects
  one of several workers (``app.store.leader_election``).
- *wish*: the usage that a caller would like to have granted as a lease.
- *hold*: the units of one lease in one bucket, which count as used while the lease lasts.
- *settle*: to report the spent units of a lease: they are charged, and the rest is freed.
- *lapse*: the end of an unsettled lease: all its units then count as spent.

Producer ids
------------

- *seen*, *unseen*: whether the principal's filter holds an id. Only unseen ids are charged.
- *layer*: a time slice of the filter. Ids are written to the open layer, and a layer dies as a whole.
  Elsewhere: layer (KIP-936), generation or slice (BF).
- *segment*: a part of the filter, added when the newest segment is full. It covers all layers. Elsewhere: a
  filter in the series of a scalable Bloom filter (BF).
- *shape*: the size of a segment: its blocks, and how many hashes an id has. Elsewhere: (m, k) (BF).
- *share*: the part of the allowed false-seen probability that a segment may use: share s is ``2**-s`` of it.
  Elsewhere: the tightening ratio of a scalable Bloom filter (BF).
- *spread*: the 32 bytes that an id's digest is spread over, which select its block and cells; also the
  function that computes them. Elsewhere: the k hash functions (BF).
- *known*: of an id: this node may answer for it without the store. Elsewhere: a cached positive.
- *renewal*: a message of a node that writes known ids to the open layer again, uncharged; it restores ids
  that the store lost. Elsewhere: re-assertion.
- *capacity*: the reason for a throttle when a principal has as many remembered ids as it may have.

Histories
---------

- *assertion*: one row about a bucket at a moment, computed by a job over the log: charges, an id, a sample or
  tokens that the bucket should hold. Elsewhere: a backfill record.
- *load*: to add assertions to buckets. Loading is idempotent and never removes anything.
  Elsewhere: backfill, import.
"""
