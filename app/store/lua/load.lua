--[[ Loads a history into buckets. It only adds, and is idempotent.

Last of the parts of the script that loads (app/store/loading.py); call.lua has the parts shared with decisions.

KEYS[1]  string  how many assertions of this load are done (TTL 7 days)
KEYS[n]  string  n >= 2: a bucket, as for a decision

ARGV[1]  The call: as for a decision (call.lua).
ARGV[2]  struct <d d>: now (ms since 1970; ignored under the store's clock), assertions done after this call (count)
ARGV[n]  n >= 3: the content of bucket KEYS[n - 1]: a quota as in an ask (call.lua), in which `usage` is the kind of the
         items and `ids` their count; then the items, in order of time:
           1  ids      struct <I4 x 8, d d>: spread, written at (ms), begin of its layer (ms)
           2  charges  struct <d d>: time (ms), ids (count)
           3  samples  struct <d d d>: sum (units), start (ms), last event (ms)
           4  tokens   struct <d d>: tokens (units), time (ms)

Reply    { now as text (ms since 1970), for each bucket struct <I4 I4 I4 I4> }: how many items were added, were there
         already, were over by now, had no room

Example  A token bucket that held -5 tokens a minute ago, in a store without it, as the last of 7 assertions:
         FCALL quotagate_... 2 qg1:backfill:NAME qg1:{user=alice}:...
           pack('<BBd', 0, 0, 1000000)   pack('<dd', 0, 7)
           pack('<BBI2dddddd', 2, 0, 1, 0.01, 4, 20, 100, 0, 30000) .. pack('<dd', -5, 1763719682123)
         { '1763719742123', pack('<I4I4I4I4', 1, 0, 0, 0) }
]]

local LOADERS = { 'load_ids', 'load_charges', 'load_samples', 'load_tokens' }
local ALGORITHMS = { make_sampled_rate(), make_token_bucket(), make_producer_ids() }
local KEPT_MS = 7 * DAY_MS

local function load(key, packed)
  local check = { key = key }
  local kind, first, second, third, ids, algorithm, from
  algorithm, check.flags, ids, check.limit, kind, first, second, third, check.longest, from = unpack_(QUOTA, packed)
  algorithm = ALGORITHMS[algorithm]
  algorithm.load(check, first, second, third, ids, from)
  check.t = max(now, check.newest or now) -- if the clock fell back, the next ask moves the bucket, not a load
  local tally = { 0, 0, 0, 0 }
  algorithm[LOADERS[kind]](check, packed, from, ids, tally)
  return pack('<I4I4I4I4', tally[ADDED], tally[THERE], tally[OVER], tally[NO_ROOM])
end

local function run(keys, args)
  begin(keys, args)
  assert(#args == #keys + 1, 'a load takes an argument for each bucket, after the first two')
  local done
  mode, now, done = ADMIT_MODE, unpack_('<dd', args[2])
  if not caller_clock then now = store_now() end
  if is_full() then return redis.error_reply('OOM the store is full: it takes nothing new') end
  local answers = { string.format('%.0f', now) }
  for i = 3, #args do answers[i - 1] = load(keys[i - 1], args[i]) end
  call('SET', keys[1], string.format('%.0f', done), 'PX', KEPT_MS)
  return answers
end
