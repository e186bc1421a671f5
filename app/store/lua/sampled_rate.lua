--[[ The sampled rate (app/domain/sampled_rate.py has the rules and the reasons; the arithmetic and its order agree).

KEYS     string  one bucket; TTL: until its last sample is over
ARGV     samples (count), sample_ms (ms); both arrive as the first two parameters of a quota (call.lua)
State    <I4 d d d d d d>  previous samples (count), their sum (units, added oldest first), oldest's start (ms), oldest's
                           last event (ms), then the current sample: value (units), start (ms), last event (ms)
         <d d d>           for each previous sample, oldest first: value (units), start (ms), last event (ms)
         While no sample begins or ends, only the 52 bytes of the head are read and written.
Example  samples of 1000 ms, state <1, 30, 0, 900, 4, 1000, 1200> <30, 0, 900>: a usage of 2 at 1500 ms goes into the
         current sample, <1, 30, 0, 900, 6, 1000, 1500>; one at 2000 ms begins a sample, and that one becomes previous
]]

local RATE, SAMPLE = '<I4dddddd', '<ddd'
local RATE_BYTES, SAMPLE_BYTES = 52, 24
local sampled_rate = {}

function sampled_rate.load(check, samples, sample_ms)
  check.samples, check.sample_ms = samples, sample_ms
  check.decided = band(check.flags, DENY) > 0 and max(check.samples, 2) or check.samples
  check.span = check.decided * check.sample_ms
  check.clock_window = check.samples * check.sample_ms
  local head = call('GETRANGE', check.key, 0, RATE_BYTES - 1)
  if #head < RATE_BYTES then
    check.n, check.rest, check.value, check.start, check.last = 0, 0, 0, -huge, -huge
    return
  end
  check.n, check.rest, check.oldest, check.oldest_last, check.value, check.start, check.last = unpack_(RATE, head)
  check.newest = check.last
end

-- All samples, oldest first, the current one last: {value, start, last event}.
local function samples_of(check)
  local list = {}
  if check.n > 0 then
    local packed = call('GETRANGE', check.key, RATE_BYTES, -1)
    for i = 1, check.n do
      local value, start, last = unpack_(SAMPLE, packed, (i - 1) * SAMPLE_BYTES + 1)
      list[i] = { value, start + (check.moved or 0), last + (check.moved or 0) }
    end
  end
  if check.newest then list[check.n + 1] = { check.value, check.start, check.last } end
  return list
end

-- The sum of the previous samples that are live, and the start of the oldest of them.
local function previous(check, at)
  if check.n == 0 then return 0, nil end
  if at - check.oldest_last < check.span then return check.rest, check.oldest end
  local sum, oldest, list = 0, nil, samples_of(check)
  for i = 1, check.n do
    if at - list[i][3] < check.span then
      sum = sum + list[i][1]
      oldest = oldest or list[i][2]
    end
  end
  return sum, oldest
end

-- The sum of the live samples and the age of the oldest.
local function live_sum(check, at)
  local sum, oldest = previous(check, at)
  if at - check.last >= check.span then return 0, 0 end
  return sum + check.value, at - (oldest or check.start)
end

-- The same, if the usage had been recorded at t.
local function recorded(check, t, at)
  if at - t >= check.span then return 0, 0 end
  local sum, oldest = previous(check, at)
  if t - check.start < check.sample_ms then
    return sum + (check.value + check.usage), at - (oldest or check.start)
  end
  if at - check.last < check.span then
    sum = sum + check.value
    oldest = oldest or check.start
  end
  return sum + check.usage, at - (oldest or t)
end

local function window_of(check, elapsed)
  local missing = check.decided - 1 - floor(elapsed / check.sample_ms)
  return max(elapsed + max(missing, 0) * check.sample_ms, 1)
end

local function least_window(units, limit)
  local guess = units * 1000 / limit
  if guess > UNREACHABLE_MS then return UNREACHABLE_MS end
  local window = max(ceil(guess), 1)
  while window > 1 and units / ((window - 1) / 1000) <= limit do window = window - 1 end
  while units / (window / 1000) > limit do window = window + 1 end
  return window
end

local function first_passing(check, at)
  local sum, elapsed = recorded(check, at, at)
  local need = least_window(sum, check.limit)
  local full = (check.decided - 1) * check.sample_ms
  if need <= full then return at end
  if elapsed < full and need < full + check.sample_ms then
    return at + max(0, need - full - elapsed % check.sample_ms)
  end
  return max(at, at - elapsed + need)
end

local function wait(check)
  local edges = { check.start + check.sample_ms }
  for _, sample in ipairs(samples_of(check)) do edges[#edges + 1] = sample[3] + check.span end
  table.sort(edges)
  local at = check.t + 1
  for _, edge in ipairs(edges) do
    if edge > at then
      local passes = first_passing(check, at)
      if passes < edge then return passes - check.now end
      at = edge
    end
  end
  return first_passing(check, at) - check.now
end

local function delay(check, later)
  local at = check.t + later
  local sum, elapsed = recorded(check, check.t, at)
  local window = window_of(check, elapsed)
  local observed = sum / (window / 1000)
  if observed <= check.limit then return ADMIT, 0 end
  if check.limit == 0 then return DELAY, check.longest end
  return DELAY, rounded((observed - check.limit) / check.limit * window, check.longest)
end

function sampled_rate.judge(check, later)
  if band(check.flags, DENY) == 0 then return delay(check, later) end
  if check.usage == 0 then return ADMIT, 0 end
  local full = (check.decided - 1) * check.sample_ms / 1000
  if check.usage / full > check.limit then return REJECT, 0, TOO_LARGE, check.limit * full end
  local sum, elapsed = recorded(check, check.t, check.t)
  if sum / (window_of(check, elapsed) / 1000) <= check.limit then return ADMIT, 0 end
  return THROTTLE, min(wait(check), MAX_THROTTLE_MS)
end

local function write_all(check, list)
  local current = list[#list]
  local packed, sum = {}, 0
  for i = 1, #list - 1 do
    packed[i] = pack(SAMPLE, list[i][1], list[i][2], list[i][3])
    sum = sum + list[i][1]
  end
  check.n, check.rest, check.oldest, check.oldest_last = #list - 1, sum, list[1][2], list[1][3]
  check.value, check.start, check.last = current[1], current[2], current[3]
  local head = pack(RATE, check.n, sum, check.oldest, check.oldest_last, check.value, check.start, check.last)
  -- The current sample may take events for sample_ms more, and those writes do not move the expiry.
  local lasts = check.start + check.sample_ms + max(check.samples, 2) * check.sample_ms - check.now
  set(check.key, head .. table.concat(packed), ttl(lasts))
end

local function write_head(check)
  if check.n == 0 then check.oldest, check.oldest_last = check.start, check.last end
  set_range(check.key, 0,
    pack(RATE, check.n, check.rest, check.oldest, check.oldest_last, check.value, check.start, check.last))
end

function sampled_rate.move(check, by, writing)
  check.moved = by
  check.start, check.last, check.newest = check.start + by, check.last + by, check.newest + by
  check.oldest, check.oldest_last = check.oldest + by, check.oldest_last + by
  if writing then
    write_all(check, samples_of(check))
    check.moved = 0
  end
end

function sampled_rate.touch() end

function sampled_rate.charge(check)
  local t = check.t
  if t - check.start < check.sample_ms then
    check.value, check.last = check.value + check.usage, t
    write_head(check)
  else
    local kept, list = max(check.samples, 2) * check.sample_ms, {}
    for _, sample in ipairs(samples_of(check)) do
      if t - sample[3] < kept then list[#list + 1] = sample end
    end
    list[#list + 1] = { check.usage, t, t }
    write_all(check, list)
  end
  return true
end

function sampled_rate.refund(check)
  if not check.newest then return end
  local list, left = samples_of(check), check.usage
  for i = #list, 1, -1 do
    local taken = min(list[i][1], left)
    list[i][1], left = list[i][1] - taken, left - taken
  end
  local packed = {}
  check.rest = 0
  for i = 1, check.n do
    check.rest = check.rest + list[i][1]
    packed[i] = pack(SAMPLE, list[i][1], list[i][2], list[i][3])
  end
  check.value = list[check.n + 1][1]
  write_head(check)
  if check.n > 0 then set_range(check.key, RATE_BYTES, table.concat(packed)) end
end

function sampled_rate.report(check)
  local sum, elapsed = live_sum(check, check.t)
  local seconds = window_of(check, elapsed) / 1000
  return sum / seconds, check.limit * seconds - sum, 0, 0
end
