--[[ What a call brings and what it returns.

keys     for each ask in order: the key of its kept answer, if it has an id; then a key for each of its quotas.
         In a call that is logged, the key of the order at the end.
args[1]  the call:   <B B d>   1 if the callers' clocks decide; 1 to sum delays as KIP-124 does, plus 2 to be logged;
                               ids a principal may have
args[n]  an ask:     <B B d>   mode, quotas, at_ms (of the caller's clock; else not looked at)
                     <I2>      length of its context, plus 1; 0 if the ask has no id
                     quotas    <B B I2 d d d d d d>  algorithm, flags, ids, limit, usage, a, b, c, longest delay,
                               then 32 bytes for each id
                     context   what the node wants back with a kept answer
         a, b, c     sampled rate: samples, sample_ms, -; token bucket: burst, deepest debt (units), -;
                     ids: window, interval, ttl (ms)
Returns  { now in ms, answer, answer, ... }: of the first asks at least one, of all unless the call wrote much; an
         answer is "\0" and <B B B d d d d d d> for each quota: outcome,
         reason, clock correction + 4 x live layers, throttle_ms, observed, remaining, largest, remembered ids, fill
         (of a token bucket: how many units of a debt were forgiven);
         or "\1" and a kept one: <I2> length of its context, context, quotas as above; or "\2" and why there is none.
         A call that is logged returns besides: its order, then for each answer what became of the ids, a byte each.
         Reason 4, the store is full: the quota was not looked at, and nothing is charged to it.
State    one string a bucket, drawn at the head of each algorithm's file; every key has a TTL.

All of this is built once, when the library is first called (app/store/library.py), and lives as long as it: what
belongs to one call is set anew by `begin`.
]]

local CALL, ASK, QUOTA, SAID = '<BBd', '<BBdI2', '<BBI2dddddd', '<BBBdddddd'
local ADMIT_MODE, PEEK, RECORD, REFUND, REFRESH = 0, 1, 2, 3, 4
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
local call = redis.call

local KEYS, ARGV, caller_clock, max_ids, sequential, logged, clock, written, full
local looked_at, was_full = -huge, false

local function begin(keys, args)
  local ways
  KEYS, ARGV, clock, written, full = keys, args, nil, 0, nil
  caller_clock, ways, max_ids = unpack_(CALL, args[1])
  caller_clock = caller_clock == 1
  sequential, logged = band(ways, 1) > 0, band(ways, 2) > 0
end

local function store_now()
  clock = clock or call('TIME')
  return clock[1] * 1000 + floor(clock[2] / 1000)
end

-- Writes that may be large are counted.
local function set(key, text, ttl_ms)
  written = written + #text
  call('SET', key, text, 'PX', ttl_ms)
end

local function set_range(key, at, text)
  written = written + #text
  call('SETRANGE', key, at, text)
end

-- Whether the store has no room for what is new: asked before a key or a segment is made, so that the last eighth is
-- left to those that are there. A look is good for a while, and one answer holds for a call.
local function is_full()
  if full == nil then
    local now = store_now()
    if now - looked_at >= LOOK_EVERY_MS or now < looked_at then
      looked_at, was_full = now, false
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

-- How long a key must last, as text: ms from the real now until its state equals an absent one, and some slack.
local function ttl(ms)
  ms = ceil(min(ms + SLACK_MS, LONGEST_TTL_MS))
  if caller_clock then ms = max(ms, DAY_MS) end
  return string.format('%.0f', ms)
end

-- A delay in ms, rounded half up, at least 1 and at most the longest.
local function rounded(ms, longest)
  return max(1, floor(min(ms, longest) + 0.5))
end
