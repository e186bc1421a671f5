--[[ The sampled rate (app/domain/sampled_rate.py has the rules and the reasons; the arithmetic and its order agree).

KEYS     string  one bucket; TTL: until its last sample is over
ARGV     samples (count), sample_ms (ms); both arrive as the first two parameters of a quota (call.lua)
State    <I4 d d d d d d>  previous samples (count) plus 256 times the birth (undo.lua), their sum (units, added oldest
                           first), oldest's start (ms), oldest's last event (ms), then the current sample: value
                           (units), start (ms), last event (ms)
         <d d d>           for each previous sample, oldest first: value (units), start (ms), last event (ms)
         then its leases, if it has some (holds.lua); their units count as recorded now
         While no sample begins or ends, only the last 32 bytes of the head are written: an event moves the expiry
         only when it begins a sample.
Example  samples of 1000 ms, state <1, 30, 0, 900, 4, 1000, 1200> <30, 0, 900>: a usage of 2 at 1500 ms goes into the
         current sample, <1, 30, 0, 900, 6, 1000, 1500>; one at 2000 ms begins a sample,
         and the sample of 1000 ms becomes a previous one
]]

local RATE, SAMPLE = '<I4dddddd', '<ddd'
local RATE_BYTES, SAMPLE_BYTES = 52, 24
local BIRTH = 256 -- the factor of a birth in its sum with the count of previous samples
local CURRENT, CURRENT_AT = '<dddd', '20' -- the end of the head: the oldest's last event, and the current sample
local sampled_rate = {}

-- The whole state is read in one piece, `text`; the previous samples in it are unpacked only when they are needed.
function sampled_rate.load(check, samples, sample_ms)
  local deny, decided = check.flags % 2 == DENY, samples -- the lowest flag; a call of `band` takes longer
  if deny and samples < 2 then decided = 2 end
  check.deny, check.decided, check.span = deny, decided, decided * sample_ms
  check.samples, check.sample_ms, check.moved = samples, sample_ms, 0
  check.window, check.is_charged, check.birth, check.took, check.holds = false, false, 0, 0, false
  local text = call('GET', check.key)
  if text and #text >= RATE_BYTES then
    local n, last
    n, check.rest, check.oldest, check.oldest_last, check.value, check.start, last = unpack_(RATE, text)
    if n >= BIRTH then check.birth, n = floor(n / BIRTH), n % BIRTH end
    local size = RATE_BYTES + n * SAMPLE_BYTES
    if #text > size then
      read_holds(check, text, size)
      text = string.sub(text, 1, size)
    end
    check.n, check.last, check.newest, check.text = n, last, last, text
  else
    check.n, check.rest, check.oldest, check.oldest_last, check.value, check.start, check.last =
      0, 0, -huge, -huge, 0, -huge, -huge
    check.text, check.newest = '', false
  end
end

function sampled_rate.clock_window(check)
  return check.samples * check.sample_ms
end

-- The i-th of the previous samples, oldest first, from 1: value, start, last event.
local function sample_at(check, i)
  local value, start, last = unpack_(SAMPLE, check.text, RATE_BYTES + (i - 1) * SAMPLE_BYTES + 1)
  return value, start + check.moved, last + check.moved
end

-- How many of the previous samples are over. They are in order of their last events, so these are the oldest ones.
local function count_over(check, at, span)
  local over = 0
  while over < check.n do
    local _, _, last = sample_at(check, over + 1)
    if at - last < span then break end
    over = over + 1
  end
  return over
end

-- The sum of the previous samples after the first `over`, added oldest first.
local function sum_after(check, over)
  if over == 0 then return check.rest end
  local sum = 0
  for i = over + 1, check.n do sum = sum + sample_at(check, i) end
  return sum
end

-- All samples, oldest first, the current one last: {value, start, last event}.
local function samples_of(check)
  local list = {}
  for i = 1, check.n do list[i] = { sample_at(check, i) } end
  if check.newest then list[check.n + 1] = { check.value, check.start, check.last } end
  return list
end

-- The sum of the previous samples that are live, and the start of the oldest of them.
local function previous(check, at)
  if check.n == 0 then return 0, nil end
  if at - check.oldest_last < check.span then return check.rest, check.oldest end
  local over = count_over(check, at, check.span)
  if over == check.n then return 0, nil end
  local _, oldest = sample_at(check, over + 1)
  return sum_after(check, over), oldest
end

-- The sum of the live samples and the age of the oldest.
local function live_sum(check, at)
  if at - check.last >= check.span then return 0, 0 end
  local sum, oldest = previous(check, at)
  return sum + check.value, at - (oldest or check.start)
end

-- As live_sum, if the usage had been recorded at t.
local function recorded(check, t, at)
  if at - t >= check.span then return 0, 0 end
  local sum, oldest = previous(check, at)
  local start = check.start
  if t - start < check.sample_ms then return sum + (check.value + check.usage), at - (oldest or start) end
  if at - check.last < check.span then
    sum = sum + check.value
    oldest = oldest or start
  end
  return sum + check.usage, at - (oldest or t)
end

local function window_of(check, elapsed)
  local sample_ms = check.sample_ms
  local missing = check.decided - 1 - (elapsed - elapsed % sample_ms) / sample_ms
  if missing > 0 then return elapsed + missing * sample_ms end
  return elapsed > 1 and elapsed or 1
end

-- The sum and the window of the rate at `at`, if the usage were recorded now.
local function measure(check, at)
  local t = check.t
  local sum, elapsed = recorded(check, t, at)
  local window = window_of(check, elapsed)
  if at == t then check.sum, check.window = sum, window end -- true after a charge; report reuses it
  return sum, window
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

-- When the i-th sample is over; the current one is the last.
local function over_at(check, i)
  if i > check.n + 1 then return huge end
  if i > check.n then return check.last + check.span end
  local _, _, last = sample_at(check, i)
  return last + check.span
end

-- Whether the usage is more than an empty bucket can hold.
local function is_too_large(check)
  return check.usage / ((check.decided - 1) * check.sample_ms / 1000) > check.limit
end

-- When the usage passes, from `at` on and before `stop`; nil if it does not. Without a stop the usage is not too large.
-- The live samples change only where a sample is over, or where the current one ends: search between these edges.
local function passing(check, at, stop)
  local ends, i = check.start + check.sample_ms, 1
  while true do
    local edge = over_at(check, i)
    if ends < edge then edge, ends = ends, huge else i = i + 1 end
    if edge > at then
      if edge > stop then edge = stop end
      -- with no live sample the window cannot grow
      if stop == huge or at - check.last < check.span or not is_too_large(check) then
        local passes = first_passing(check, at)
        if passes < edge then return passes end
      end
      if edge == stop then return nil end
      at = edge
    end
  end
end

local wait_beside_holds -- defined below, after the functions that it calls

local function delay(check, later)
  local limit = check.limit
  local sum, window = measure(check, check.t + later)
  local observed = sum / (window / 1000)
  if observed <= limit then return ADMIT, 0 end
  if limit == 0 then return DELAY, check.longest end
  return DELAY, rounded((observed - limit) / limit * window, check.longest)
end

-- Judge a usage; check.usage is the usage plus the units that leases hold.
local function judge_with(check, usage, later)
  if not check.deny then return delay(check, later) end
  if usage == 0 then return ADMIT, 0 end
  local limit, full = check.limit, (check.decided - 1) * check.sample_ms / 1000
  if usage / full > limit then return REJECT, 0, TOO_LARGE, limit * full end
  local sum, window = measure(check, check.t)
  if sum / (window / 1000) <= limit then return ADMIT, 0 end
  local passes = check.holds and wait_beside_holds(check, usage) or passing(check, check.t + 1, huge)
  return THROTTLE, min(passes - now, MAX_THROTTLE_MS)
end

function sampled_rate.judge(check, later)
  local usage = check.usage
  if not check.holds then return judge_with(check, usage, later) end
  check.usage = usage + check.held
  local outcome, throttle_ms, reason, largest = judge_with(check, usage, later)
  check.usage = usage
  return outcome, throttle_ms, reason, largest
end

-- The head of the state. Without previous samples the current one is the oldest.
local function head_of(check)
  if check.n == 0 then check.oldest, check.oldest_last = check.start, check.last end
  return pack(RATE, check.n + check.birth * BIRTH, check.rest, check.oldest, check.oldest_last, check.value, check.start, check.last)
end

-- Put the state together: a sample began, or all of them moved.
local function rebuild(check, previous_samples)
  check.text, check.moved = head_of(check) .. previous_samples, 0
end

-- Write the whole state.
local function write_all(check, previous_samples)
  rebuild(check, previous_samples)
  -- The current sample may take events for sample_ms more, and those writes do not move the expiry.
  local begins = check.start
  local text = check.text
  if check.holds then begins, text = max(begins, last_end(check)), text .. packed_holds(check) end
  set(check.key, text, ttl(begins + check.sample_ms + max(check.samples, 2) * check.sample_ms - now))
end

-- Pack the previous samples of a list, and sum them up.
local function pack_previous(check, list)
  local packed, sum = {}, 0
  for i = 1, #list - 1 do
    packed[i] = pack(SAMPLE, list[i][1], list[i][2], list[i][3])
    sum = sum + list[i][1]
  end
  check.n, check.rest, check.oldest, check.oldest_last = #list - 1, sum, list[1][2], list[1][3]
  check.value, check.start, check.last = list[#list][1], list[#list][2], list[#list][3]
  return table.concat(packed)
end

function sampled_rate.move(check, by, writing)
  check.moved = by
  check.start, check.last, check.newest = check.start + by, check.last + by, check.newest + by
  check.oldest, check.oldest_last = check.oldest + by, check.oldest_last + by
  end_birth(check)
  if check.holds then
    move_holds(check, by)
    rebuild(check, pack_previous(check, samples_of(check)))
  end
  if writing then write_all(check, pack_previous(check, samples_of(check))) end
end

-- Begin a sample: the current one joins the previous samples, without those that are over; returns them, packed.
local function begin_sample(check, usage, t)
  local span = max(check.samples, 2) * check.sample_ms
  local over = count_over(check, t, span)
  local packed = string.sub(check.text, RATE_BYTES + over * SAMPLE_BYTES + 1)
  check.rest, check.n = sum_after(check, over), check.n - over
  if t - check.last < span then
    packed = packed .. pack(SAMPLE, check.value, check.start, check.last)
    check.rest, check.n = check.rest + check.value, check.n + 1
  end
  if check.n > 0 then
    local _
    _, check.oldest, check.oldest_last = unpack_(SAMPLE, packed)
  end
  check.value, check.start, check.last = usage, t, t
  return packed
end

-- Record without writing; `write_record` writes it.
local function record(check, usage, t)
  if t - check.start < check.sample_ms then
    check.value, check.last = check.value + usage, t
    if check.n == 0 then check.oldest_last = t end
  else
    rebuild(check, begin_sample(check, usage, t))
  end
end

local function write_record(check)
  write_all(check, string.sub(check.text, RATE_BYTES + 1))
end

-- The time from which the usage passes. Each lease until then counts as spent at its end, so leases are recorded one by
-- one; the state is restored afterwards.
function wait_beside_holds(check, usage)
  local holds, at = check.holds, check.t + 1
  local n, rest, oldest, oldest_last = check.n, check.rest, check.oldest, check.oldest_last
  local value, start, last, text = check.value, check.start, check.last, check.text
  local passes
  for i, hold in ipairs(holds) do
    check.usage = usage + units_of(holds, i, #holds)
    passes = passing(check, at, hold[3])
    if passes then break end
    at = max(at, hold[3])
    record(check, hold[2], max(hold[3], check.last))
  end
  check.usage = usage
  passes = passes or passing(check, at, huge)
  check.n, check.rest, check.oldest, check.oldest_last = n, rest, oldest, oldest_last
  check.value, check.start, check.last, check.text = value, start, last, text
  return passes
end

-- Record the units of leases that are over.
function sampled_rate.reckon(check)
  local holds, over = end_holds(check)
  for i = 1, over do record(check, holds[i][2], max(holds[i][3], check.last)) end
end

function sampled_rate.touch(check)
  if check.holds and check.lapsed > 0 then write_record(check) end
end

function sampled_rate.charge(check)
  local t, usage, start, is_born = check.t, check.usage, check.start, stamped and check.birth == 0
  check.is_charged, check.took = true, usage
  if is_born then bear(check) end
  if check.holds and check.lapsed > 0 then
    record(check, usage, t)
    write_record(check)
  elseif t - start < check.sample_ms then
    local value = check.value + usage
    check.value, check.last = value, t
    if check.n == 0 then check.oldest_last = t end
    if is_born then
      set_range(check.key, '0', head_of(check))
    else
      set_range(check.key, CURRENT_AT, pack(CURRENT, check.oldest_last, value, start, t))
    end
  else
    write_all(check, begin_sample(check, usage, t))
  end
  return true
end

function sampled_rate.capacity(check)
  return check.limit * ((check.decided - 1) * check.sample_ms / 1000)
end

function sampled_rate.hold(check, lease, lease_ms)
  record(check, 0, check.t)
  add_hold(check, lease, check.usage, lease_ms)
  write_record(check)
end

function sampled_rate.settle(check, lease)
  if not remove_hold(check, lease) then
    sampled_rate.touch(check)
    return false
  end
  record(check, check.usage, check.t)
  write_record(check)
  return true
end

-- Write samples after something was given back. The TTL changes only if leases ended that nobody had settled.
local function write_back(check, list)
  local packed = pack_previous(check, list)
  if check.holds and check.lapsed > 0 then
    write_all(check, packed)
  else
    rebuild(check, packed)
    set_range(check.key, '0', check.text)
  end
end

function sampled_rate.refund(check)
  if not check.newest then return end
  local list, left = samples_of(check), check.usage
  for i = #list, 1, -1 do
    local taken = min(list[i][1], left)
    list[i][1], left = list[i][1] - taken, left - taken
  end
  write_back(check, list)
end

-- Give back in the sample that took the charge. A sample that is over, or gone, has nothing to give.
function sampled_rate.undo(check)
  if not is_undoable(check) then return 0 end
  local list, at = samples_of(check), check.undone_at
  for i = #list, 1, -1 do
    if list[i][2] <= at and at <= list[i][3] then
      local given = min(list[i][1], check.usage)
      if given == 0 then return 0 end
      list[i][1] = list[i][1] - given
      write_back(check, list)
      return given
    end
  end
  return 0
end

function sampled_rate.report(check)
  local sum, window = check.sum, check.window
  if check.holds or not (window and check.is_charged) then
    local elapsed
    sum, elapsed = live_sum(check, check.t)
    sum, window = sum + held_by(check), window_of(check, elapsed)
  end
  local seconds = window / 1000
  return sum / seconds, check.limit * seconds - sum, check.holds and check.lapsed or 0, 0
end
