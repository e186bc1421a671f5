--[[ The token bucket (app/domain/token_bucket.py has the rules and the reasons).

KEYS     string  one bucket; TTL: until the bucket is full again
ARGV     burst (units), max_debt (units); both arrive as the first two parameters of a quota (call.lua)
State    <d d>   tokens (units; negative in debt), the time they were counted at (ms)
         <d d d> only of a bucket with a birth: the birth (undo.lua), the largest limit since it was born (units a
                 second), the burst of its last write (units)
         then its leases, if it has some (holds.lua); their tokens were taken when they were granted, and while they
         last the bucket fills only up to the burst less their units (check.most)
Example  limit 10 a second, burst 20, state <16, 1000>: at 1200 ms the bucket holds 16 + 10 * 0.2 = 18 tokens, so a
         usage of 4 is admitted and leaves <14, 1200>
]]

local TOKENS, TOKENS_BYTES, BORN, BORN_BYTES = '<dd', 16, '<ddd', 24
local token_bucket = {}

-- The level to which the bucket fills while leases hold some units; at least 0, after a lowered burst.
local function most_tokens(check, held)
  return max(check.burst - held, 0)
end

function token_bucket.load(check, burst, max_debt)
  check.burst, check.max_debt = burst, max_debt
  check.deny = check.flags % 2 == DENY -- the lowest flag; a call of `band` takes longer
  check.over, check.forgiven, check.birth, check.took = 0, 0, 0, 0
  check.holds, check.most = false, burst
  local packed = call('GET', check.key)
  if packed then
    check.tokens, check.at = unpack_(TOKENS, packed)
    if #packed > TOKENS_BYTES then
      local size = TOKENS_BYTES
      if (#packed - size) % HELD_BYTES == BORN_BYTES then
        check.birth, check.peak, check.old_burst = unpack_(BORN, packed, size + 1)
        size = size + BORN_BYTES
      end
      if #packed > size then
        read_holds(check, packed, size)
        check.most = most_tokens(check, check.held)
      end
    end
  else
    check.tokens, check.at = false, false
  end
  check.newest = check.at
end

function token_bucket.clock_window(check)
  return check.limit > 0 and check.burst / check.limit * 1000 or huge
end

local function tokens_at(check, tokens, since, at)
  return min(check.most, tokens + check.limit * ((at - since) / 1000))
end

-- The tokens, with any debt beyond max_debt forgiven; `over` adds up the forgiven debt.
local function forgive(check, tokens)
  if tokens >= -check.max_debt then return tokens end
  check.over = check.over + (-check.max_debt - tokens)
  return -check.max_debt
end

-- The tokens now. A debt beyond max_debt is forgiven when it is seen; the next write keeps that.
local function tokens_now(check)
  if not check.newest then return check.burst end
  local tokens = tokens_at(check, check.tokens, check.at, check.t)
  if tokens < -check.max_debt then check.tokens, check.at = forgive(check, tokens), check.t end
  return max(tokens, -check.max_debt)
end

-- The end of the state. A burst that was lowered may have cut off tokens, so nothing can be given back exactly.
local function pack_birth(check)
  if check.burst < check.old_burst or check.over > 0 then end_birth(check) end
  check.peak, check.old_burst = max(check.peak, check.limit), check.burst
  return pack(BORN, check.birth, check.peak, check.burst)
end

local function write_tokens(check)
  local full_in = 0
  if check.tokens < check.burst then
    full_in = check.limit > 0 and (check.burst - check.tokens) / check.limit * 1000 or huge
  end
  local text, at = pack(TOKENS, check.tokens, check.at), check.at
  if check.birth > 0 then text = text .. pack_birth(check) end
  if check.holds then text, at = text .. packed_holds(check), max(at, last_end(check)) end
  call('SET', check.key, text, 'PX', ttl(at - now + full_in))
end

-- Advance to the end of each of the first `over` leases; returns the tokens at the last end, and that end.
local function past_ends(check, holds, over, tokens, since)
  for i = 1, over do
    local ends = max(holds[i][3], since)
    check.most = most_tokens(check, units_of(holds, i, #holds))
    tokens, since = tokens_at(check, tokens, since, ends), ends
  end
  check.most = most_tokens(check, units_of(holds, over + 1, #holds))
  return tokens, since
end

-- Count the leases that are over as spent; the bucket fills further without them.
function token_bucket.reckon(check)
  local holds, over = end_holds(check)
  check.tokens, check.at = past_ends(check, holds, over, check.tokens, check.at)
  check.newest = check.at
end

-- The tokens at a later time, when some leases may be over.
local function tokens_later(check, tokens, since, at)
  local holds, over = check.holds, 0
  if not holds then return tokens_at(check, tokens, since, at) end
  while over < #holds and holds[over + 1][3] <= at do over = over + 1 end
  tokens, since = past_ends(check, holds, over, tokens, since)
  tokens = tokens_at(check, tokens, since, at)
  check.most = most_tokens(check, check.held)
  return tokens
end

-- The shortest wait (ms) after which the bucket holds the usage. The level never falls, so bisection finds it.
local function refill_wait(check)
  local tokens, since = check.tokens or check.burst, check.at or check.t
  local fails, passes = 0, MAX_THROTTLE_MS
  if tokens_later(check, tokens, since, check.t + passes) < check.usage then return passes end
  while passes - fails > 1 do
    local d = floor((fails + passes) / 2)
    if tokens_later(check, tokens, since, check.t + d) >= check.usage then passes = d else fails = d end
  end
  return passes
end

function token_bucket.judge(check, later)
  local tokens = tokens_now(check)
  if not check.deny then
    tokens = tokens_at(check, max(tokens - check.usage, -check.max_debt), check.t, check.t + later)
    if tokens >= 0 then return ADMIT, 0 end
    if check.limit == 0 then return DELAY, check.longest end
    return DELAY, rounded(-tokens / check.limit * 1000, check.longest)
  end
  if check.usage > check.burst then return REJECT, 0, TOO_LARGE, check.burst end
  if check.usage == 0 or tokens >= check.usage then return ADMIT, 0 end
  return THROTTLE, min(check.t - now + refill_wait(check), MAX_THROTTLE_MS)
end

function token_bucket.move(check, by, writing)
  check.at, check.newest = check.at + by, check.newest + by
  end_birth(check)
  if check.holds then move_holds(check, by) end
  if writing then write_tokens(check) end
end

function token_bucket.touch(check)
  tokens_now(check)
  if check.over == 0 and lapsed_in(check) == 0 then return end
  check.forgiven = check.over
  write_tokens(check)
end

-- Charge without writing.
local function take(check)
  local before = tokens_now(check)
  check.tokens, check.at = forgive(check, before - check.usage), check.t
  check.forgiven, check.took = check.over, before - check.tokens
  check.newest = check.t
end

function token_bucket.charge(check)
  take(check)
  if stamped and check.birth == 0 then
    bear(check)
    check.peak, check.old_burst = check.limit, check.burst
  end
  write_tokens(check)
  return true
end

function token_bucket.capacity(check)
  return check.burst
end

function token_bucket.hold(check, lease, lease_ms)
  take(check)
  add_hold(check, lease, check.usage, lease_ms)
  check.most = most_tokens(check, check.held)
  write_tokens(check)
end

function token_bucket.settle(check, lease)
  local tokens = tokens_now(check)
  local units = remove_hold(check, lease)
  if not units then
    token_bucket.touch(check)
    return false
  end
  check.forgiven, check.most = check.over, most_tokens(check, check.held)
  check.tokens, check.at, check.newest = min(check.most, tokens + (units - check.usage)), check.t, check.t
  write_tokens(check)
  return true
end

function token_bucket.refund(check)
  if not check.newest then return end
  tokens_now(check)
  check.forgiven = check.over
  end_birth(check) -- without an earlier charge, some of it might have been cut off at the burst
  check.tokens = min(check.most, check.tokens + check.usage)
  write_tokens(check)
end

-- Give back the charged tokens, less those that the bucket may have refilled since: these might have been cut off.
function token_bucket.undo(check)
  if not is_undoable(check) then return 0 end
  local tokens = tokens_now(check)
  if check.over > 0 then
    check.forgiven = check.over
    write_tokens(check)
    return 0
  end
  local given = check.usage - max(check.peak, check.limit) * ((check.t - check.undone_at) / 1000)
  given = min(given, check.most - check.tokens)
  if given <= 0 then return 0 end
  check.tokens = check.tokens + given
  write_tokens(check)
  return given
end

function token_bucket.report(check)
  local tokens = tokens_now(check)
  return check.burst - tokens, tokens, lapsed_in(check), check.forgiven
end
