--[[ Adding what a history says to buckets: it adds, it never forgets, and twice is as once.

keys     how far the load has come; then the key of each bucket.
args[1]  the call: as for a decision
args[2]  <d d>     now (under the callers' clocks; else not looked at), assertions that are done after this call
args[n]  a bucket: a quota as in an ask, its `usage` the kind of what follows: 1 ids <I4 x 8, d d> spread, written
         at, layer's begin; 2 charges <d d> time, ids; 3 samples <d d d> sum, start, last event; 4 a level <d d>
         tokens, time; and its `ids` how many
Returns  { now in ms, for each bucket <I4 I4 I4 I4>: added, there, over, no room }
]]

local LOADERS = { 'load_ids', 'load_charges', 'load_samples', 'load_tokens' }
local ALGORITHMS = { make_sampled_rate(), make_token_bucket(), make_producer_ids() }
local KEPT_MS = 7 * DAY_MS

local function load(key, packed, now)
  local part, kind, from = { key = key, now = now, mode = ADMIT_MODE }
  part.kind, part.flags, part.ids, part.limit, kind, part.a, part.b, part.c, part.longest, from =
    unpack_(QUOTA, packed)
  part.algorithm = ALGORITHMS[part.kind]
  part.algorithm.load(part)
  part.t = max(now, part.newest or now) -- a load moves no time: the next ask will, if the clock fell back
  local became = { 0, 0, 0, 0 }
  part.algorithm[LOADERS[kind]](part, packed, from, part.ids, became)
  return pack('<I4I4I4I4', became[ADDED], became[THERE], became[OVER], became[NO_ROOM])
end

local function run(keys, args)
  begin(keys, args)
  local now, done = unpack_('<dd', args[2])
  if not caller_clock then now = store_now() end
  if is_full() then return redis.error_reply('OOM the store is full: it takes nothing new') end
  local answers = { string.format('%.0f', now) }
  for i = 3, #args do answers[i - 1] = load(keys[i - 1], args[i], now) end
  call('SET', keys[1], string.format('%.0f', done), 'PX', KEPT_MS)
  return answers
end
