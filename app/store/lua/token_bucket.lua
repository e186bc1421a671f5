--[[ The token bucket (app/domain/token_bucket.py says what and why).

State  <d d>  tokens, the time they were counted at
]]

local TOKENS = '<dd'
local token_bucket = {}

function token_bucket.load(part)
  part.burst, part.max_debt = part.a, part.b
  part.clock_window = part.limit > 0 and part.burst / part.limit * 1000 or huge
  local packed = call('GET', part.key)
  if packed then
    part.tokens, part.at = unpack_(TOKENS, packed)
    part.newest = part.at
  end
end

local function tokens_at(part, tokens, since, at)
  return min(part.burst, tokens + part.limit * ((at - since) / 1000))
end

-- The tokens with no deeper debt than there may be; `over` is how much of one that forgives.
local function forgive(part, tokens)
  if tokens >= -part.max_debt then return tokens end
  part.over = (part.over or 0) + (-part.max_debt - tokens)
  return -part.max_debt
end

-- A debt that is too deep is forgiven where it is seen, and stays so once something is written.
local function tokens_now(part)
  if not part.newest then return part.burst end
  local tokens = tokens_at(part, part.tokens, part.at, part.t)
  if tokens < -part.max_debt then part.tokens, part.at = forgive(part, tokens), part.t end
  return max(tokens, -part.max_debt)
end

local function write_tokens(part)
  local full_in = 0
  if part.tokens < part.burst then
    full_in = part.limit > 0 and (part.burst - part.tokens) / part.limit * 1000 or huge
  end
  call('SET', part.key, pack(TOKENS, part.tokens, part.at), 'PX', ttl(part.at - part.now + full_in))
end

-- The least d at which the bucket holds the cost; what it holds never falls, so halving finds it.
local function refill_wait(part)
  local tokens, since = part.tokens or part.burst, part.at or part.t
  local fails, passes = 0, MAX_THROTTLE_MS
  if tokens_at(part, tokens, since, part.t + passes) < part.usage then return passes end
  while passes - fails > 1 do
    local d = floor((fails + passes) / 2)
    if tokens_at(part, tokens, since, part.t + d) >= part.usage then passes = d else fails = d end
  end
  return passes
end

function token_bucket.judge(part, later)
  local tokens = tokens_now(part)
  if band(part.flags, DENY) == 0 then
    tokens = tokens_at(part, max(tokens - part.usage, -part.max_debt), part.t, part.t + later)
    if tokens >= 0 then return ADMIT, 0 end
    if part.limit == 0 then return DELAY, part.longest end
    return DELAY, rounded(-tokens / part.limit * 1000, part.longest)
  end
  if part.usage > part.burst then return REJECT, 0, TOO_LARGE, part.burst end
  if part.usage == 0 or tokens >= part.usage then return ADMIT, 0 end
  return THROTTLE, min(part.t - part.now + refill_wait(part), MAX_THROTTLE_MS)
end

function token_bucket.move(part, by, writing)
  part.at, part.newest = part.at + by, part.newest + by
  if writing then write_tokens(part) end
end

function token_bucket.touch(part)
  tokens_now(part)
  if not part.over then return end
  part.forgiven = part.over
  write_tokens(part)
end

function token_bucket.charge(part)
  part.tokens, part.at = forgive(part, tokens_now(part) - part.usage), part.t
  part.forgiven = part.over
  part.newest = part.t
  write_tokens(part)
  return true
end

function token_bucket.refund(part)
  if not part.newest then return end
  tokens_now(part)
  part.forgiven = part.over
  part.tokens = min(part.burst, part.tokens + part.usage)
  write_tokens(part)
end

function token_bucket.shows(part)
  local tokens = tokens_now(part)
  return part.burst - tokens, tokens, 0, part.forgiven or 0
end
