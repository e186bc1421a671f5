--[[ The sampled rate (app/domain/sampled_rate.py says what and why; the arithmetic and its order are the same).

State  <I4 d d d d d d>  previous samples, their sum (oldest first), oldest's start, oldest's last event,
                         the current sample's value, start, last event
       <d d d>           for each previous sample, oldest first: value, start, last event
While no sample begins or dies, only the 52 bytes of the head are read and written.
]]

local RATE, SAMPLE = '<I4dddddd', '<ddd'
local RATE_BYTES, SAMPLE_BYTES = 52, 24
local sampled_rate = {}

function sampled_rate.load(part)
  part.samples, part.sample_ms = part.a, part.b
  part.decided = band(part.flags, DENY) > 0 and max(part.samples, 2) or part.samples
  part.span = part.decided * part.sample_ms
  part.clock_window = part.samples * part.sample_ms
  local head = call('GETRANGE', part.key, 0, RATE_BYTES - 1)
  if #head < RATE_BYTES then
    part.n, part.rest, part.value, part.start, part.last = 0, 0, 0, -huge, -huge
    return
  end
  part.n, part.rest, part.oldest, part.oldest_last, part.value, part.start, part.last = unpack_(RATE, head)
  part.newest = part.last
end

-- All samples, oldest first, the current one last: {value, start, last event}.
local function samples_of(part)
  local list = {}
  if part.n > 0 then
    local packed = call('GETRANGE', part.key, RATE_BYTES, -1)
    for i = 1, part.n do
      local value, start, last = unpack_(SAMPLE, packed, (i - 1) * SAMPLE_BYTES + 1)
      list[i] = { value, start + (part.moved or 0), last + (part.moved or 0) }
    end
  end
  if part.newest then list[part.n + 1] = { part.value, part.start, part.last } end
  return list
end

-- The sum of the previous samples that are live, and the start of the oldest of them.
local function previous(part, at)
  if part.n == 0 then return 0, nil end
  if at - part.oldest_last < part.span then return part.rest, part.oldest end
  local sum, oldest, list = 0, nil, samples_of(part)
  for i = 1, part.n do
    if at - list[i][3] < part.span then
      sum = sum + list[i][1]
      oldest = oldest or list[i][2]
    end
  end
  return sum, oldest
end

-- The sum of the live samples and the age of the oldest.
local function standing(part, at)
  local sum, oldest = previous(part, at)
  if at - part.last >= part.span then return 0, 0 end
  return sum + part.value, at - (oldest or part.start)
end

-- The same, had the usage been recorded at t.
local function recorded(part, t, at)
  if at - t >= part.span then return 0, 0 end
  local sum, oldest = previous(part, at)
  if t - part.start < part.sample_ms then
    return sum + (part.value + part.usage), at - (oldest or part.start)
  end
  if at - part.last < part.span then
    sum = sum + part.value
    oldest = oldest or part.start
  end
  return sum + part.usage, at - (oldest or t)
end

local function window_of(part, elapsed)
  local missing = part.decided - 1 - floor(elapsed / part.sample_ms)
  return max(elapsed + max(missing, 0) * part.sample_ms, 1)
end

local function least_window(units, limit)
  local guess = units * 1000 / limit
  if guess > UNREACHABLE_MS then return UNREACHABLE_MS end
  local window = max(ceil(guess), 1)
  while window > 1 and units / ((window - 1) / 1000) <= limit do window = window - 1 end
  while units / (window / 1000) > limit do window = window + 1 end
  return window
end

local function first_passing(part, at)
  local sum, elapsed = recorded(part, at, at)
  local need = least_window(sum, part.limit)
  local full = (part.decided - 1) * part.sample_ms
  if need <= full then return at end
  if elapsed < full and need < full + part.sample_ms then
    return at + max(0, need - full - elapsed % part.sample_ms)
  end
  return max(at, at - elapsed + need)
end

local function wait(part)
  local edges = { part.start + part.sample_ms }
  for _, sample in ipairs(samples_of(part)) do edges[#edges + 1] = sample[3] + part.span end
  table.sort(edges)
  local at = part.t + 1
  for _, edge in ipairs(edges) do
    if edge > at then
      local passes = first_passing(part, at)
      if passes < edge then return passes - part.now end
      at = edge
    end
  end
  return first_passing(part, at) - part.now
end

local function delay(part, later)
  local at = part.t + later
  local sum, elapsed = recorded(part, part.t, at)
  local window = window_of(part, elapsed)
  local observed = sum / (window / 1000)
  if observed <= part.limit then return ADMIT, 0 end
  if part.limit == 0 then return DELAY, part.longest end
  return DELAY, rounded((observed - part.limit) / part.limit * window, part.longest)
end

function sampled_rate.judge(part, later)
  if band(part.flags, DENY) == 0 then return delay(part, later) end
  if part.usage == 0 then return ADMIT, 0 end
  local full = (part.decided - 1) * part.sample_ms / 1000
  if part.usage / full > part.limit then return REJECT, 0, TOO_LARGE, part.limit * full end
  local sum, elapsed = recorded(part, part.t, part.t)
  if sum / (window_of(part, elapsed) / 1000) <= part.limit then return ADMIT, 0 end
  return THROTTLE, min(wait(part), MAX_THROTTLE_MS)
end

local function write_all(part, list)
  local current = list[#list]
  local packed, sum = {}, 0
  for i = 1, #list - 1 do
    packed[i] = pack(SAMPLE, list[i][1], list[i][2], list[i][3])
    sum = sum + list[i][1]
  end
  part.n, part.rest, part.oldest, part.oldest_last = #list - 1, sum, list[1][2], list[1][3]
  part.value, part.start, part.last = current[1], current[2], current[3]
  local head = pack(RATE, part.n, sum, part.oldest, part.oldest_last, part.value, part.start, part.last)
  -- the current sample may take events for sample_ms yet; no later write moves the expiry until it is closed
  local lasts = part.start + part.sample_ms + max(part.samples, 2) * part.sample_ms - part.now
  set(part.key, head .. table.concat(packed), ttl(lasts))
end

local function write_head(part)
  if part.n == 0 then part.oldest, part.oldest_last = part.start, part.last end
  set_range(part.key, 0,
    pack(RATE, part.n, part.rest, part.oldest, part.oldest_last, part.value, part.start, part.last))
end

function sampled_rate.move(part, by, writing)
  part.moved = by
  part.start, part.last, part.newest = part.start + by, part.last + by, part.newest + by
  part.oldest, part.oldest_last = part.oldest + by, part.oldest_last + by
  if writing then
    write_all(part, samples_of(part))
    part.moved = 0
  end
end

function sampled_rate.touch() end

function sampled_rate.charge(part)
  local t = part.t
  if t - part.start < part.sample_ms then
    part.value, part.last = part.value + part.usage, t
    write_head(part)
  else
    local kept, list = max(part.samples, 2) * part.sample_ms, {}
    for _, sample in ipairs(samples_of(part)) do
      if t - sample[3] < kept then list[#list + 1] = sample end
    end
    list[#list + 1] = { part.usage, t, t }
    write_all(part, list)
  end
  return true
end

function sampled_rate.refund(part)
  if not part.newest then return end
  local list, left = samples_of(part), part.usage
  for i = #list, 1, -1 do
    local taken = min(list[i][1], left)
    list[i][1], left = list[i][1] - taken, left - taken
  end
  local packed = {}
  part.rest = 0
  for i = 1, part.n do
    part.rest = part.rest + list[i][1]
    packed[i] = pack(SAMPLE, list[i][1], list[i][2], list[i][3])
  end
  part.value = list[part.n + 1][1]
  write_head(part)
  if part.n > 0 then set_range(part.key, RATE_BYTES, table.concat(packed)) end
end

function sampled_rate.shows(part)
  local sum, elapsed = standing(part, part.t)
  local seconds = window_of(part, elapsed) / 1000
  return sum / seconds, part.limit * seconds - sum, 0, 0
end
