-- One ask after the other: look at every quota, then write all or nothing.

local PRODUCER_IDS = 3
local ALGORITHMS = { make_sampled_rate(), make_token_bucket(), make_producer_ids() }
local store_time, next_key, fates

-- A quota's own answer, with what its key and the mode make of it.
local function say(part, later)
  if part.mode == REFUND then return ADMIT, 0 end
  if part.limit == 0 and part.usage > 0 and part.kind ~= PRODUCER_IDS then
    if part.mode == RECORD then return DELAY, part.longest end
    return REJECT, 0, TOO_LARGE, 0
  end
  local outcome, throttle_ms, reason, largest = part.algorithm.judge(part, later)
  if outcome == THROTTLE and band(part.flags, CONNECTION) > 0 then
    if band(part.flags, RECHECK) > 0 then return REJECT, 0 end
    return THROTTLE, min(throttle_ms, RECHECK_MS)
  end
  return outcome, throttle_ms, reason, largest
end

-- A quota that would begin a bucket in a full store is not decided here, but by the node: as the store's absence is.
local function judge(part, later)
  part.outcome, part.throttle_ms, part.reason, part.largest = say(part, later)
  if part.newest or part.mode ~= ADMIT_MODE and part.mode ~= RECORD then return end
  if part.outcome > DELAY and band(part.flags, SHADOW) == 0 then return end -- which charges nothing
  if part.kind == PRODUCER_IDS and #part.unseen == 0 then return end
  if is_full() then
    part.outcome, part.throttle_ms, part.reason = band(part.flags, CLOSED) > 0 and THROTTLE or ADMIT, 0, STORE_FULL
  end
end

-- A now behind the newest time is taken as that; by more than a window, the bucket moves back with it.
local function correct(part)
  part.t, part.correction = part.now, 0
  if not part.newest or part.now >= part.newest then return end
  if part.newest - part.now <= part.clock_window or part.mode == REFUND then
    part.t, part.correction = part.newest, TAKEN_AS_NEWEST
  else
    part.algorithm.move(part, part.now - part.newest, part.mode ~= PEEK)
    part.correction = MOVED_BACK
  end
end

local function read_parts(ask, mode, quotas, now)
  local parts, at = {}, 13
  for i = 1, quotas do
    local part = { key = KEYS[next_key], mode = mode, now = now, ask = ask }
    next_key = next_key + 1
    part.kind, part.flags, part.ids, part.limit, part.usage, part.a, part.b, part.c, part.longest, at =
      unpack_(QUOTA, ask, at)
    part.algorithm, part.ids_at = ALGORITHMS[part.kind], at
    at = at + part.ids * 32
    parts[i] = part
  end
  return parts, at
end

local function is_refused(parts)
  for _, part in ipairs(parts) do
    if part.outcome >= THROTTLE and band(part.flags, SHADOW) == 0 then return true end
  end
  return false
end

-- KIP-124: the request delays are measured after the larger byte delay has passed.
local function sum_delays(parts)
  local byte_delay = 0
  for _, part in ipairs(parts) do
    if band(part.flags, BYTES) > 0 and band(part.flags, SHADOW) == 0 and part.outcome == DELAY then
      byte_delay = max(byte_delay, part.throttle_ms)
    end
  end
  for _, part in ipairs(parts) do
    if band(part.flags, REQUESTS) > 0 then judge(part, byte_delay) end
  end
end

-- Write what the decision leaves; whether a bucket was charged or given back to.
local function leave(parts, mode)
  if mode == PEEK then return false end
  if mode == REFUND then
    for _, part in ipairs(parts) do part.algorithm.refund(part) end
    return #parts > 0
  end
  if mode == REFRESH or is_refused(parts) then
    for _, part in ipairs(parts) do part.algorithm.touch(part) end
    return false
  end
  local charged = false
  for _, part in ipairs(parts) do
    if part.reason ~= STORE_FULL and part.algorithm.charge(part) then charged = true end
  end
  return charged
end

local function answer_of(parts)
  local said = {}
  for i, part in ipairs(parts) do
    local observed, remaining, ids, fill, layers = part.algorithm.shows(part)
    said[i] = pack(SAID, part.outcome, part.reason or 0, part.correction + 4 * (layers or 0), part.throttle_ms,
      observed, remaining, part.largest or 0, ids, fill)
  end
  return table.concat(said)
end

-- What became of the ids of an ask: a byte for each of a part that counts ids, of which there is at most one.
local function fates_of(parts)
  for _, part in ipairs(parts) do
    if part.kind == PRODUCER_IDS then
      local fates = {}
      for i = 1, part.ids do fates[i] = string.char(part.became and part.became[i] or 0) end
      return table.concat(fates)
    end
  end
  return ''
end

local function decide(ask)
  local mode, quotas, at_ms, context = unpack_(ASK, ask)
  local now = caller_clock and at_ms or store_time
  local retry
  if context > 0 then
    retry = KEYS[next_key]
    next_key = next_key + 1
    local kept = call('GET', retry)
    if kept and now - unpack_('<d', kept) < RETRY_MS then
      next_key = next_key + quotas
      return '\1' .. string.sub(kept, 9)
    end
  end
  local parts, ends = read_parts(ask, mode, quotas, now)
  for _, part in ipairs(parts) do
    part.algorithm.load(part)
    correct(part)
    judge(part, 0)
  end
  if sequential then sum_delays(parts) end
  local charged = leave(parts, mode)
  local answer = answer_of(parts)
  fates = logged and fates_of(parts) or ''
  if retry and charged and not is_full() then
    local kept = pack('<dI2', now, context - 1) .. string.sub(ask, ends) .. answer
    set(retry, kept, caller_clock and ttl(RETRY_MS) or RETRY_MS)
  end
  return '\0' .. answer
end

-- An answer, or why there is none. A bucket of another type and a fault of this script are one ask's own
-- trouble. What else the store refuses (a write for want of memory, say) it refuses to all: the call fails.
local function guarded(ask)
  local first = next_key
  local fine, answer = pcall(decide, ask)
  if fine then return answer end
  local why = type(answer) == 'table' and answer.err or tostring(answer)
  if not (string.find(why, '^WRONGTYPE') or string.find(why, '^user_function')) then return nil, why end
  local _, quotas, _, context = unpack_(ASK, ask)
  next_key = first + quotas + (context > 0 and 1 or 0)
  return '\2' .. why
end

-- Whether any ask of the call may write: peeks do not, and so they take no number.
local function may_write()
  for i = 2, #ARGV do
    if string.byte(ARGV[i]) ~= PEEK then return true end
  end
  return false
end

local function run(keys, args)
  begin(keys, args)
  store_time, next_key = caller_clock or store_now(), 1
  local answers, of_ids = { string.format('%.0f', caller_clock and 0 or store_time) }, {}
  local order = logged and string.format('%.0f', may_write() and next_order(keys[#keys], clock) or 0)
  for i = 2, #args do
    if written >= MOST_WRITTEN then break end -- the rest comes with the next call
    fates = ''
    local answer, refused = guarded(args[i])
    if refused then return redis.error_reply(refused) end
    answers[i], of_ids[i - 1] = answer, fates
  end
  if logged then
    answers[#answers + 1] = order
    for _, its in ipairs(of_ids) do answers[#answers + 1] = its end
  end
  return answers
end
