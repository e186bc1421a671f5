--[[ The arguments and reply of a call to the script; the variables and functions that all its parts share.

The script is one function, run(KEYS, ARGV), assembled from these files by app/store/script.py. It decides the asks of
one call in order, each atomically. It is built once, when its library is first called (app/store/library.py), and
lives as long as the library; `begin` sets the variables of one call.

KEYS     For each ask, in order:
           string  the answer kept for the ask, only if the ask has an id (TTL: how long a retry gets it again);
                   in mode renew the number of the bucket's last reset (TTL: how long a node may know its ids),
                   and one more key, the birth of the store's state (mark.lua)
           string  for each quota of the ask: its bucket; the algorithm's file draws the state
         In a call that is logged, at the end:
           string  the number of the last call that was logged (order.lua)

ARGV[1]  The call, struct <B B d>:
           B  1 if the callers' clocks decide, 0 if the store's does
           B  1 to add delays up as KIP-124 does, plus 2 if the call is logged, plus 4 for brief answers
           d  the most ids remembered for one principal (count)
ARGV[n]  An ask, n >= 2, struct <B B d I2>, then its quotas, then its context:
           B  mode: 0 admit, 1 peek, 2 record, 3 refund, 4 refresh, 5 renew, 6 hold, 7 settle, 16 undo (undo.lua),
              17 peek_hold: the units that hold would take in these buckets, without a write;
              plus 32 to keep the answer even if no bucket of this ask was charged: buckets of other slots were,
              64 to answer with the stamps of the charges, which undo needs,
              128 if a byte delay follows
           B  quotas (count)
           d  the caller's time (ms since 1970); ignored under the store's clock
           I2 length of the context (bytes) + 1; 0 if the ask has no id
           d  only if announced: the byte delay that buckets of other slots gave (ms), for KIP-124's sum
         A quota, struct <B B I2 d d d d d d>, then its ids:
           B  algorithm: 1 sampled rate, 2 token bucket, 3 producer ids
           B  flags: 1 deny, 2 shadow, 4 connection creation rate, 8 recheck, 16 byte rate, 32 request rate,
              64 throttle where the store cannot decide
           I2 ids (count)
           d  limit (units a second; of producer ids: ids a window)
           d  usage (units; of producer ids: ids); in mode renew the number of the last reset that the node knew of;
              in modes hold and peek_hold the wish, in mode settle the spent units,
              in mode undo the units that the charge took
           ddd parameters of the algorithm:
              sampled rate:  samples (count), sample_ms (ms), which usage field (number)
              token bucket:  burst (units), max_debt (units), which usage field (number)
              producer ids:  window (ms), interval (ms), ttl of a layer (ms)
           d  longest delay (ms)
           32 bytes for each id: its spread, eight I4; in mode undo one, which is the stamp of the charge (undo.lua)
         The context: bytes that the node wants back with a kept answer. In mode renew the birth that the node knows,
         with the history. In modes hold, peek_hold and settle instead struct <c16 d>: the name of the lease, how
         long it lasts (ms; 0 in mode settle).

Reply    { now, answer, answer, ... }
           now     the store's time, an integer (ms since 1970); 0 under the callers' clocks
           answer  for the first asks, in order: at least one, and all unless the call wrote more than MOST_WRITTEN
                   '\0' and a result for each quota
                   '\1' and the kept answer: I2 length of the context, the context, a result for each quota
                   '\2' and the reason why there is no answer: the bucket cannot be read
                   '\3' and d observed, d remaining of each quota, in a call with brief answers: all admit, none counts
                   ids, and no result has more values
                   '\4' and a result for each quota; then the charge of each quota, which undo needs, and the history
                   (undo.lua)
         A logged call adds its number, an integer (0 if it could write nothing), and the outcomes of ids, one string:
         for each ask with ids, I2 its place among the answers (from 0), I2 ids (count), and for each id one byte:
         0 not written, 1 charged, 2 refreshed.
         A result, struct <B B B d d d d d d>:
           B  outcome: 0 admit, 1 delay, 2 throttle, 3 reject; in mode renew 2 if the store's state is not the one that
              the node knows, 3 if the bucket was reset since; in mode settle 3 if nothing is held for the lease
           B  reason: 0 none, 1 capacity, 2 too large, 4 the store is full (this quota was not judged nor charged)
           B  clock: 0, 1 taken as the bucket's newest time, 2 bucket moved back; plus 4 x live layers of ids (count)
           d  throttle_ms (ms)
           d  observed (units of the limit), d remaining (units), d largest usage that could pass (units; 0 if none)
              or instead of it
                for ids that were not too many: how long (ms) the layer that now holds all ids of the ask stays open;
                0 if it does not hold all; if the ask is throttled: minus the number of unseen ids;
                in mode hold, if it is granted: the units now held; in mode peek_hold: the units that this bucket
                would grant; in mode undo: the units that were given back
           d  ids remembered (count); for units: the units of unsettled leases that ended since the last write
           d  fill of the newest filter (0 to 1); for a token bucket: units of debt that were forgiven; in modes hold,
              peek_hold and settle: units that the bucket holds now

Example  An ask for 4 of a token bucket with 10 a second and burst 20, under the store's clock:
         FCALL quotagate_... 1 qg1:{user=alice}:request_rate:user=alice:token_bucket.11.1000.cluster.0
           pack('<BBd', 0, 0, 1000000)
           pack('<BBdI2', 0, 1, 0, 0) .. pack('<BBI2dddddd', 2, 1, 0, 10, 4, 20, 100, 0, 30000)
         { 1763719742123, '\0' .. pack('<BBBdddddd', 0, 0, 0, 0, 4, 16, 0, 0, 0) }
]]

local CALL, ASK, QUOTA, RESULT = '<BBd', '<BBdI2', '<BBI2dddddd', '<BBBdddddd'
local CONTEXT_AT = 11 -- where the length of the context is in an ask
local FIRST_RESULT, BRIEF, FIRST_BRIEF = '<xBBBdddddd', '<dd', '<Bdd' -- the first with the byte before it
local LEASE = '<c16d'
local ADMIT_MODE, PEEK, RECORD, REFUND, REFRESH, RENEW, HOLD, SETTLE, UNDO, PEEK_HOLD = 0, 1, 2, 3, 4, 5, 6, 7, 16, 17
local KEEP, STAMPED, DELAYED = 32, 64, 128
local ADMIT, DELAY, THROTTLE, REJECT = 0, 1, 2, 3
local CAPACITY, TOO_LARGE, STORE_FULL = 1, 2, 4
local DENY, SHADOW, CONNECTION, RECHECK, BYTES, REQUESTS, CLOSED = 1, 2, 4, 8, 16, 32, 64
local TAKEN_AS_NEWEST, MOVED_BACK = 1, 2
local CHARGED, REFRESHED = 1, 2

local SLACK_MS = 60000
local DAY_MS = 86400000

local floor, ceil, min, max, sqrt, huge = math.floor, math.ceil, math.min, math.max, math.sqrt, math.huge
local band, bor, lshift = bit.band, bit.bor, bit.lshift
local pack, unpack_ = struct.pack, struct.unpack
local byte = string.byte
local call = redis.call

local KEYS, ARGV, caller_clock, max_ids, sequential, logged, brief, clock, written, full, history
local ask, mode, now -- the ask at hand, its mode and its time (ms)
local keeps, stamped, delayed -- whether the ask at hand wants its answer kept, and stamps; its delay elsewhere (ms)
local checked_at, was_full = -huge, false

local function begin(keys, args)
  local options
  KEYS, ARGV, clock, written, full, history = keys, args, nil, 0, nil, nil
  caller_clock, options, max_ids = unpack_(CALL, args[1])
  caller_clock = caller_clock == 1
  sequential, logged, brief = band(options, 1) > 0, band(options, 2) > 0, band(options, 4) > 0
end

local function store_now()
  clock = clock or call('TIME')
  return clock[1] * 1000 + floor(clock[2] / 1000)
end

-- Writes that may be large are counted in `written` (bytes).
local function set(key, text, ttl_ms)
  written = written + #text
  call('SET', key, text, 'PX', ttl_ms)
end

local function set_range(key, at, text)
  written = written + #text
  call('SETRANGE', key, at, text)
end

-- Whether the store is too full for anything new. Checked before a key or a segment is made, so that the last eighth of
-- the memory serves existing keys. One check holds for CHECK_FULL_EVERY_MS, and for the whole call.
local function is_full()
  if full == nil then
    local now = store_now()
    if now - checked_at >= CHECK_FULL_EVERY_MS or now < checked_at then
      checked_at, was_full = now, false
      local memory = redis.pcall('INFO', 'memory')
      if type(memory) == 'string' then
        local used, most = string.match(memory, 'used_memory:(%d+)'), string.match(memory, 'maxmemory:(%d+)')
        was_full = tonumber(most) > 0 and used * 8 > most * 7
      end
    end
    full = was_full
  end
  return full
end

-- The TTL of a key: the ms from the real now until its state means the same as no key, plus some slack. If it does so
-- already, as a token bucket filled by a refund, the TTL is the slack alone: the store takes no TTL below 1.
local function ttl(ms)
  ms = ceil(min(max(ms, 0) + SLACK_MS, LONGEST_TTL_MS))
  return caller_clock and max(ms, DAY_MS) or ms
end

-- A delay in ms, rounded half up, at least 1 and at most the longest.
local function rounded(ms, longest)
  return max(1, floor(min(ms, longest) + 0.5))
end
