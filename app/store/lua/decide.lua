--[[ Decides one ask after the other: judges every quota of an ask, then writes for all of them or for none.

Last of the parts of the script (app/store/script.py); call.lua says what a call brings and what it returns.
A `check` is one quota of one ask: what the ask brought, the bucket as its algorithm loaded it, and the outcome.
Each algorithm has the same functions: load, judge, move, touch, charge, refund, report.

Example  of two quotas, the first admits and the second refuses: neither is charged (both are touched), and the answer
         has both results. Had the second quota been in shadow mode, both would have been charged
]]

local PRODUCER_IDS = 3
local ALGORITHMS = { make_sampled_rate(), make_token_bucket(), make_producer_ids() }
local store_time, next_key, id_outcomes

-- The outcome of one quota by itself: its algorithm's, adjusted for the mode and for connection rates.
local function own_result(check, later)
  if check.mode == REFUND then return ADMIT, 0 end
  if check.limit == 0 and check.usage > 0 and check.kind ~= PRODUCER_IDS then
    if check.mode == RECORD then return DELAY, check.longest end
    return REJECT, 0, TOO_LARGE, 0
  end
  local outcome, throttle_ms, reason, largest = check.algorithm.judge(check, later)
  if outcome == THROTTLE and band(check.flags, CONNECTION) > 0 then
    if band(check.flags, RECHECK) > 0 then return REJECT, 0 end
    return THROTTLE, min(throttle_ms, RECHECK_MS)
  end
  return outcome, throttle_ms, reason, largest
end

-- A quota that needs a new bucket in a full store gets STORE_FULL: the node then decides as if the store were away.
local function judge(check, later)
  check.outcome, check.throttle_ms, check.reason, check.largest = own_result(check, later)
  if check.newest or check.mode ~= ADMIT_MODE and check.mode ~= RECORD then return end
  if check.outcome > DELAY and band(check.flags, SHADOW) == 0 then return end -- a refused ask charges nothing, so it makes no bucket
  if check.kind == PRODUCER_IDS and #check.unseen == 0 then return end
  if is_full() then
    check.outcome, check.throttle_ms, check.reason = band(check.flags, CLOSED) > 0 and THROTTLE or ADMIT, 0, STORE_FULL
  end
end

-- Handle a clock that is behind the bucket: use the bucket's newest time as now. If the clock is behind by more than
-- a window, move the bucket back instead.
local function correct(check)
  check.t, check.correction = check.now, 0
  if not check.newest or check.now >= check.newest then return end
  if check.newest - check.now <= check.clock_window or check.mode == REFUND then
    check.t, check.correction = check.newest, TAKEN_AS_NEWEST
  else
    check.algorithm.move(check, check.now - check.newest, check.mode ~= PEEK)
    check.correction = MOVED_BACK
  end
end

-- Unpack the quotas of an ask and load their buckets; also where the ask's context begins.
local function read_checks(ask, mode, quotas, now)
  local checks, at = {}, 13
  for i = 1, quotas do
    local check = { key = KEYS[next_key], mode = mode, now = now, ask = ask }
    next_key = next_key + 1
    local first, second, third -- the parameters of the algorithm, which names them
    check.kind, check.flags, check.ids, check.limit, check.usage, first, second, third, check.longest, at =
      unpack_(QUOTA, ask, at)
    check.algorithm, check.ids_at = ALGORITHMS[check.kind], at
    at = at + check.ids * 32
    check.algorithm.load(check, first, second, third)
    checks[i] = check
  end
  return checks, at
end

local function is_refused(checks)
  for _, check in ipairs(checks) do
    if check.outcome >= THROTTLE and band(check.flags, SHADOW) == 0 then return true end
  end
  return false
end

-- KIP-124: a client waits out the larger byte delay first, so request rates are judged as of after that.
local function sum_delays(checks)
  local byte_delay = 0
  for _, check in ipairs(checks) do
    if band(check.flags, BYTES) > 0 and band(check.flags, SHADOW) == 0 and check.outcome == DELAY then
      byte_delay = max(byte_delay, check.throttle_ms)
    end
  end
  for _, check in ipairs(checks) do
    if band(check.flags, REQUESTS) > 0 then judge(check, byte_delay) end
  end
end

-- Write the effect of the decision; whether a bucket was charged or refunded.
local function apply(checks, mode)
  if mode == PEEK then return false end
  if mode == REFUND then
    for _, check in ipairs(checks) do check.algorithm.refund(check) end
    return #checks > 0
  end
  if mode == REFRESH or is_refused(checks) then
    for _, check in ipairs(checks) do check.algorithm.touch(check) end
    return false
  end
  local charged = false
  for _, check in ipairs(checks) do
    if check.reason ~= STORE_FULL and check.algorithm.charge(check) then charged = true end
  end
  return charged
end

local function answer_of(checks)
  local results = {}
  for i, check in ipairs(checks) do
    local observed, remaining, ids, fill, layers = check.algorithm.report(check)
    results[i] = pack(RESULT, check.outcome, check.reason or 0, check.correction + 4 * (layers or 0), check.throttle_ms,
      observed, remaining, check.largest or 0, ids, fill)
  end
  return table.concat(results)
end

-- What became of the ids of an ask, one byte each. At most one quota of an ask counts ids.
local function id_outcomes_of(checks)
  for _, check in ipairs(checks) do
    if check.kind == PRODUCER_IDS then
      local bytes = {}
      for i = 1, check.ids do bytes[i] = string.char(check.id_outcomes and check.id_outcomes[i] or 0) end
      return table.concat(bytes)
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
  local checks, ends = read_checks(ask, mode, quotas, now)
  for _, check in ipairs(checks) do
    correct(check)
    judge(check, 0)
  end
  if sequential then sum_delays(checks) end
  local charged = apply(checks, mode)
  local answer = answer_of(checks)
  id_outcomes = logged and id_outcomes_of(checks) or ''
  if retry and charged and not is_full() then
    local kept = pack('<dI2', now, context - 1) .. string.sub(ask, ends) .. answer
    set(retry, kept, caller_clock and ttl(RETRY_MS) or RETRY_MS)
  end
  return '\0' .. answer
end

-- An answer, or the reason for a missing one. A bucket of the wrong Redis type or a bug in this script fails one ask.
-- Any other error of the store (it is out of memory, for example) fails the whole call.
local function try_decide(ask)
  local first = next_key
  local ok, answer = pcall(decide, ask)
  if ok then return answer end
  local why = type(answer) == 'table' and answer.err or tostring(answer)
  if not (string.find(why, '^WRONGTYPE') or string.find(why, '^user_function')) then return nil, why end
  local _, quotas, _, context = unpack_(ASK, ask)
  next_key = first + quotas + (context > 0 and 1 or 0)
  return '\2' .. why
end

-- Whether any ask of the call may write. Peeks do not, so a call of peeks takes no number.
local function may_write()
  for i = 2, #ARGV do
    if string.byte(ARGV[i]) ~= PEEK then return true end
  end
  return false
end

-- How many keys the asks of a call need.
local function keys_needed()
  local needed = logged and 1 or 0
  for i = 2, #ARGV do
    local _, quotas, _, context = unpack_(ASK, ARGV[i])
    needed = needed + quotas + (context > 0 and 1 or 0)
  end
  return needed
end

local function run(keys, args)
  begin(keys, args)
  assert(#keys == keys_needed(), 'a call takes one key for each quota and each kept answer of its asks')
  store_time, next_key = caller_clock or store_now(), 1
  local answers, outcomes_by_ask = { string.format('%.0f', caller_clock and 0 or store_time) }, {}
  local order = logged and string.format('%.0f', may_write() and next_order(keys[#keys], clock) or 0)
  for i = 2, #args do
    if written >= MOST_WRITTEN then break end -- the rest comes with the next call
    id_outcomes = ''
    local answer, refused = try_decide(args[i])
    if refused then return redis.error_reply(refused) end
    answers[i], outcomes_by_ask[i - 1] = answer, id_outcomes
  end
  if logged then
    answers[#answers + 1] = order
    for _, outcomes in ipairs(outcomes_by_ask) do answers[#answers + 1] = outcomes end
  end
  return answers
end
