--[[ The token bucket (app/domain/token_bucket.py has the rules and the reasons).

KEYS     string  one bucket; TTL: until the bucket is full again
ARGV     burst (units), max_debt (units); both arrive as the first two parameters of a quota (call.lua)
State    <d d>   tokens (units; negative in debt), the time they were counted at (ms)
Example  limit 10 a second, burst 20, state <16, 1000>: at 1200 ms the bucket holds 16 + 10 * 0.2 = 18 tokens, so a
         usage of 4 is admitted and leaves <14, 1200>
]]

local TOKENS = '<dd'
local token_bucket = {}

function token_bucket.load(check, burst, max_debt)
  check.burst, check.max_debt = burst, max_debt
  check.deny = check.flags % 2 == DENY -- the lowest flag; a call of `band` takes longer
  check.over, check.forgiven = 0, 0
  local packed = call('GET', check.key)
  if packed then
    check.tokens, check.at = unpack_(TOKENS, packed)
  else
    check.tokens, check.at = nil, nil
  end
  check.newest = check.at
end

function token_bucket.clock_window(check)
  return check.limit > 0 and check.burst / check.limit * 1000 or huge
end

local function tokens_at(check, tokens, since, at)
  return min(check.burst, tokens + check.limit * ((at - since) / 1000))
end

-- The tokens, with any debt beyond max_debt forgiven; `over` adds up how much was.
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

local function write_tokens(check)
  local full_in = 0
  if check.tokens < check.burst then
    full_in = check.limit > 0 and (check.burst - check.tokens) / check.limit * 1000 or huge
  end
  call('SET', check.key, pack(TOKENS, check.tokens, check.at), 'PX', ttl(check.at - now + full_in))
end

-- The shortest wait (ms) after which the bucket holds the usage. The level never falls, so bisection finds it.
local function refill_wait(check)
  local tokens, since = check.tokens or check.burst, check.at or check.t
  local fails, passes = 0, MAX_THROTTLE_MS
  if tokens_at(check, tokens, since, check.t + passes) < check.usage then return passes end
  while passes - fails > 1 do
    local d = floor((fails + passes) / 2)
    if tokens_at(check, tokens, since, check.t + d) >= check.usage then passes = d else fails = d end
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
  if writing then write_tokens(check) end
end

function token_bucket.touch(check)
  tokens_now(check)
  if check.over == 0 then return end
  check.forgiven = check.over
  write_tokens(check)
end

function token_bucket.charge(check)
  check.tokens, check.at = forgive(check, tokens_now(check) - check.usage), check.t
  check.forgiven = check.over
  check.newest = check.t
  write_tokens(check)
  return true
end

function token_bucket.refund(check)
  if not check.newest then return end
  tokens_now(check)
  check.forgiven = check.over
  check.tokens = min(check.burst, check.tokens + check.usage)
  write_tokens(check)
end

function token_bucket.report(check)
  local tokens = tokens_now(check)
  return check.burst - tokens, tokens, 0, check.forgiven
end
