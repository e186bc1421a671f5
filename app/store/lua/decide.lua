--[[ Decides one ask after the other: judges every quota of an ask, then writes for all of them or for none.

Last of the parts of the script (app/store/script.py); call.lua describes the arguments and the reply of a call.
A `check` is one quota of one ask: its values from the ask, its bucket as loaded by the algorithm, and the outcome.
Each algorithm has the same functions: load, clock_window, judge, move, touch, charge, refund, report. The algorithms
of units, not of ids, also have the functions for leases and undo: reckon, capacity, hold, settle, undo.

Example  of two quotas, the first admits and the second refuses: neither is charged (both are touched), and the answer
         has both results. Had the second quota been in shadow mode, both would have been charged
]]

local ALGORITHMS = { make_sampled_rate(), make_token_bucket(), make_producer_ids() }
local PRODUCER_IDS = ALGORITHMS[3]
local QUOTA_BYTES, FIELD_AT = 52, 36 -- the size of a quota in an ask, and the offset of its third parameter
local store_time, next_key
local answers, outcomes, place, first_key
local ids_check -- the check of the ask at hand that counts ids; at most one does
-- The checks of the ask at hand are the first `quotas` of these. Every ask uses the same tables: making tables with so
-- many fields took longer than the rest of the decision (docs/decisions/0050). So `load` sets every field that is read,
-- a missing value to false: assigning nil to a missing field may make Lua rehash the whole table.
local checks, quotas = {}, 0
local refused -- whether a quota that is not in shadow refuses the ask at hand
local renewal -- the outcome of a renewal

-- The units that a bucket grants of a wish (check.slice). Without a grant, the wait until one unit is free (the wish,
-- if that is less), or until the first lease ends if that is sooner: most leases are settled with less than they hold.
local function grant(check)
  local wish, holds = check.usage, check.holds
  if holds and #holds == 0 then holds = nil end
  check.slice = 0
  if wish == 0 then return ADMIT, 0 end
  local capacity, least = check.limit > 0 and check.algorithm.capacity(check) or 0, min(wish, 1)
  if least > capacity / 2 then return REJECT, 0, TOO_LARGE, capacity / 2 end
  local longest = band(check.flags, CONNECTION) > 0 and RECHECK_MS or MAX_THROTTLE_MS
  if holds then longest = min(longest, holds[1][3] - now) end
  if holds and #holds >= MOST_HOLDS then return THROTTLE, longest, CAPACITY end
  check.usage = least
  local outcome, throttle_ms = check.algorithm.judge(check, 0)
  check.usage = wish
  if outcome > ADMIT then return outcome, min(throttle_ms, longest) end
  local _, free = check.algorithm.report(check)
  local most = min(free, max(1, free / ((holds and #holds or 0) + 1)), (capacity - held_by(check)) / 2)
  check.slice = wish <= most and wish or max(floor(most), 0)
  if check.slice > 0 then return ADMIT, 0 end
  return THROTTLE, holds and longest or 1
end

-- The outcome of one quota by itself: its algorithm's, adjusted for the mode and for connection rates.
local function own_result(check, later)
  if mode > RECORD then
    if mode == HOLD or mode == PEEK_HOLD then return grant(check) end
    if mode == REFUND or mode == SETTLE or mode == UNDO then return ADMIT, 0 end
    if mode == RENEW then return renewal, 0 end
  end
  if check.limit == 0 and check.usage > 0 and check.algorithm ~= PRODUCER_IDS then
    if mode == RECORD then return DELAY, check.longest end
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
  local outcome, throttle_ms, reason, largest = own_result(check, later)
  check.outcome, check.throttle_ms, check.reason, check.largest = outcome, throttle_ms, reason or 0, largest or 0
  if outcome > DELAY and band(check.flags, SHADOW) == 0 then
    refused = true
    return -- a refused ask charges nothing, so it makes no bucket
  end
  if check.newest or mode ~= ADMIT_MODE and mode ~= RECORD and mode ~= HOLD then return end
  if check.algorithm == PRODUCER_IDS and #check.unseen == 0 then return end
  if is_full() then
    check.outcome, check.throttle_ms, check.reason = band(check.flags, CLOSED) > 0 and THROTTLE or ADMIT, 0, STORE_FULL
    refused = refused or check.outcome == THROTTLE and band(check.flags, SHADOW) == 0
  end
end

-- Handle a clock that is behind the bucket: use the bucket's newest time as now. If the clock is behind by more than
-- a window, move the bucket back instead.
local function correct(check)
  if check.newest - now <= check.algorithm.clock_window(check) or mode == REFUND or mode == UNDO then
    check.t, check.correction = check.newest, TAKEN_AS_NEWEST
  else
    check.algorithm.move(check, now - check.newest, mode ~= PEEK and mode ~= PEEK_HOLD)
    check.correction = MOVED_BACK
  end
end

-- Unpack the quotas of an ask and load their buckets; returns where the ask's context begins.
local function read_checks()
  local at = delayed and 21 or 13
  ids_check = nil
  for i = 1, quotas do
    local check = checks[i] or {}
    checks[i], check.key = check, KEYS[next_key]
    next_key = next_key + 1
    local algorithm, first, second, third, ids -- the algorithm names its parameters
    algorithm, check.flags, ids, check.limit, check.usage, first, second, third, check.longest, at =
      unpack_(QUOTA, ask, at)
    algorithm = ALGORITHMS[algorithm]
    check.algorithm = algorithm
    if mode == UNDO then read_stamp(check, at) end
    if algorithm == PRODUCER_IDS then ids_check = check end
    algorithm.load(check, first, second, third, ids, at)
    at = at + ids * 32
  end
  return at
end

-- KIP-124: a client waits out the larger byte delay first, so request rates are judged at the time after it.
local function sum_delays()
  local byte_delay = delayed or 0
  for i = 1, quotas do
    local check = checks[i]
    if band(check.flags, BYTES) > 0 and band(check.flags, SHADOW) == 0 and check.outcome == DELAY then
      byte_delay = max(byte_delay, check.throttle_ms)
    end
  end
  for i = 1, quotas do
    if band(checks[i].flags, REQUESTS) > 0 then judge(checks[i], byte_delay) end
  end
end

-- Hold in every bucket, or in none, the least that any bucket of the same usage field grants.
local function hold_all(lease, lease_ms)
  local slices, grants = {}, not refused
  for i = 1, quotas do
    local check = checks[i]
    check.field = unpack_('<d', ask, 13 + (i - 1) * QUOTA_BYTES + FIELD_AT)
    if check.reason == STORE_FULL then grants = false end
    if band(check.flags, SHADOW) == 0 then
      slices[check.field] = min(slices[check.field] or check.slice, check.slice)
    end
  end
  for i = 1, quotas do
    local check = checks[i]
    local units = slices[check.field] or check.usage
    if grants and band(check.flags, SHADOW) == 0 then check.largest = units end
    if grants and units > 0 and not (check.holds and #check.holds >= MOST_HOLDS) then
      check.usage = units
      check.algorithm.hold(check, lease, lease_ms)
    else
      check.algorithm.touch(check)
    end
  end
  return false
end

-- Report the units that each bucket would grant, and write nothing.
local function peek_hold_all()
  for i = 1, quotas do
    if checks[i].outcome == ADMIT then checks[i].largest = checks[i].slice end
  end
  return false
end

-- Charge the spent units of a lease, and free the rest, in each bucket that holds units for it.
local function settle_all(lease)
  for i = 1, quotas do
    local check = checks[i]
    if not check.algorithm.settle(check, lease) then check.outcome = REJECT end
  end
  return false
end

-- Write the effect of the decision; returns whether a bucket was charged or refunded.
local function apply(ends)
  if mode == PEEK then return false end
  if mode > RECORD then
    if mode == HOLD then return hold_all(unpack_(LEASE, ask, ends)) end
    if mode == SETTLE then return settle_all(unpack_(LEASE, ask, ends)) end
    if mode == PEEK_HOLD then return peek_hold_all() end
    if mode == REFUND then
      for i = 1, quotas do checks[i].algorithm.refund(checks[i]) end
      return quotas > 0
    end
    if mode == UNDO then
      for i = 1, quotas do checks[i].largest = checks[i].algorithm.undo(checks[i]) end
      return false
    end
    if mode == RENEW then
      for i = 1, renewal == ADMIT and quotas or 0 do checks[i].algorithm.renew(checks[i]) end
      return false
    end
  end
  if mode == REFRESH or refused then
    for i = 1, quotas do checks[i].algorithm.touch(checks[i]) end
    return false
  end
  local charged = false
  for i = 1, quotas do
    local check = checks[i]
    if check.reason ~= STORE_FULL and check.algorithm.charge(check) then charged = true end
  end
  return charged
end

-- The answer to an ask that was decided now. The first result is packed with the answer's first byte.
local function answer_of()
  local answer
  for i = 1, quotas do
    local check = checks[i]
    local observed, remaining, ids, fill, layers = check.algorithm.report(check)
    if mode == HOLD or mode == SETTLE or mode == PEEK_HOLD then fill = held_by(check) end
    local result = pack(i == 1 and FIRST_RESULT or RESULT, check.outcome, check.reason,
      check.correction + 4 * (layers or 0), check.throttle_ms, observed, remaining, check.largest, ids, fill)
    answer = i == 1 and result or answer .. result
  end
  return answer or '\0'
end

-- The brief answer to an ask; nil if a result has more values.
local function brief_answer()
  local answer
  for i = 1, quotas do
    local check = checks[i]
    if check.outcome ~= ADMIT or check.reason ~= 0 or check.correction ~= 0 or check.algorithm == PRODUCER_IDS then
      return nil
    end
    local observed, remaining, lapsed, forgiven = check.algorithm.report(check)
    if forgiven ~= 0 or lapsed ~= 0 then return nil end
    answer = i == 1 and pack(FIRST_BRIEF, 3, observed, remaining) or answer .. pack(BRIEF, observed, remaining)
  end
  return answer
end

-- Note the outcomes of the ids of the ask at hand, one byte each.
local function note_outcomes()
  local found, bytes = ids_check.id_outcomes, nil
  if found then
    bytes = {}
    for at = 1, ids_check.ids do bytes[at] = string.char(found[at] or 0) end
    bytes = table.concat(bytes)
  else
    bytes = string.rep('\0', ids_check.ids)
  end
  outcomes[#outcomes + 1] = pack('<I2I2', place - 2, #bytes) .. bytes
end

-- Known ids are written again unless the bucket was reset since. A state that the node does not know may have lost the
-- number of that reset.
local function outcome_of_renewal(birth, known_birth, last_reset)
  if not birth or birth .. history_now() ~= known_birth then return THROTTLE end
  return last_reset and tonumber(last_reset) > checks[1].usage and REJECT or ADMIT
end

local function decide()
  local at_ms, context, retry, kept, birth
  mode, quotas, at_ms, context = unpack_(ASK, ask)
  local is_brief = brief and context == 0 and mode < HOLD
  keeps, stamped, delayed = false, false, nil
  if mode >= UNDO then
    if band(mode, DELAYED) > 0 then delayed = unpack_('<d', ask, 13) end
    keeps, stamped, mode = band(mode, KEEP) > 0, band(mode, STAMPED) > 0, band(mode, KEEP - 1)
  end
  now = caller_clock and at_ms or store_time
  if context > 0 then
    retry = KEYS[next_key]
    next_key = next_key + 1
    kept = call('GET', retry)
    if mode == RENEW then
      birth = call('GET', KEYS[next_key])
      next_key = next_key + 1
    elseif kept and now - unpack_('<d', kept) < RETRY_MS then
      next_key = next_key + quotas
      return '\1' .. string.sub(kept, 9)
    end
  end
  local ends = read_checks()
  refused, renewal = false, mode == RENEW and outcome_of_renewal(birth, string.sub(ask, ends), kept)
  for i = 1, quotas do
    local check = checks[i]
    check.t, check.correction = now, 0
    local newest = check.newest
    if newest and now < newest then correct(check) end
    if check.holds then check.algorithm.reckon(check) end
    judge(check, 0)
  end
  if sequential then sum_delays() end
  local charged = apply(ends)
  local answer = is_brief and brief_answer() or answer_of()
  if logged and ids_check then note_outcomes() end
  if retry and (charged or keeps and not refused) and not is_full() then
    kept = pack('<dI2', now, context - 1) .. string.sub(ask, ends) .. string.sub(answer, 2)
    set(retry, kept, caller_clock and ttl(RETRY_MS) or RETRY_MS)
  end
  if stamped then return '\4' .. string.sub(answer, 2) .. charges_of(checks, quotas) end
  return answer
end

-- Decide the asks from `place` on, until the call wrote much: the rest comes with the next call.
local function decide_asks()
  while place <= #ARGV and written < MOST_WRITTEN do
    ask, first_key = ARGV[place], next_key
    answers[place] = decide()
    place = place + 1
  end
end

-- How many keys an ask with a context has in addition to its buckets.
local function more_keys(its_mode) return its_mode == RENEW and 2 or 1 end

-- Go on after an error. A bucket of the wrong Redis type or a bug in this script fails only the ask at `place`. Any
-- other error of the store (it is out of memory, for example) fails the whole call, and is returned.
local function pass_over(failed)
  local why = type(failed) == 'table' and failed.err or tostring(failed)
  if not (string.find(why, '^WRONGTYPE') or string.find(why, '^user_function')) then return why end
  local its_mode, skipped, _, context = unpack_(ASK, ask)
  next_key = first_key + skipped + (context > 0 and more_keys(its_mode) or 0)
  answers[place] = '\2' .. why
  place = place + 1
end

-- How many keys the asks of a call need; and whether any may write. A call that cannot, of peeks, takes no number.
local function needs()
  local keys, writes = logged and 1 or 0, false
  for i = 2, #ARGV do
    local its_mode, its_quotas, _, _, _, _, _, _, _, _, low, high = byte(ARGV[i], 1, CONTEXT_AT + 1)
    keys = keys + its_quotas + (low + high > 0 and more_keys(its_mode) or 0)
    writes = writes or its_mode ~= PEEK and its_mode ~= PEEK_HOLD
  end
  return keys, writes
end

local function run(keys, args)
  begin(keys, args)
  local keys_needed, writes = needs()
  assert(#keys == keys_needed, 'a call takes one key for each quota and each kept answer of its asks')
  store_time, next_key, place = caller_clock or store_now(), 1, 2
  answers, outcomes = { caller_clock and 0 or store_time }, {}
  local order = logged and writes and next_order(keys[#keys], clock) or 0
  repeat -- one pcall serves all asks up to one that fails
    local ok, failed = pcall(decide_asks)
    local fatal = not ok and pass_over(failed)
    if fatal then return redis.error_reply(fatal) end
  until ok
  if logged then
    answers[place], answers[place + 1] = order, table.concat(outcomes)
  end
  return answers
end
