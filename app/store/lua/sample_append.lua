--[[ Appends a sample of a process to the series by the second, and perhaps one to the series by the minute.

Both series together take at most 1/64 of the store's memory. Without room for a sample, the series by the second gives
up its oldest samples while it has more than half of that, otherwise the series by the minute. The last 1/32 of the
memory is left to leases, the factor and the examination, as by log_append.lua. A call removes at most MOST_REMOVED
samples of each series, so it is short.

The bytes of a series are known without counting: each entry has the number of bytes that were appended before it,
reckoned as the store's allocator may take them.

KEYS[1]  stream  the series by the second: each entry has `at` (the time until which the sample counts, in s since
                 1970), `before` (bytes that were appended to the series before it), `sample`, in this order
KEYS[2]  stream  the series by the minute: the same, with `at` in minutes
KEYS[3]  hash    bytes that were ever appended, by series: `seconds`, `minutes`
ARGV[1]  bytes   the sample, msgpack of app.store.samples.ProcessSample
ARGV[2]  bytes   the sample for the series by the minute; empty if none is due
ARGV[3]  integer the time until which the samples count (s); empty if the process does not know the store's time yet
ARGV[4]  integer the time until which the second one counts (minutes)
ARGV[5]  integer how long the series by the second goes back (ms)
ARGV[6]  integer how long the series by the minute goes back (ms), also the TTL of all keys
ARGV[7]  integer the most bytes of both series in a store without maxmemory
Reply    { now (ms since 1970), 1 if the sample was taken, 0 if there is no room }
Example  EVAL ... 3 qg1:overview:seconds qg1:overview:minutes qg1:overview:bytes SAMPLE '' 1763719742 0
           900000 86400000 67108864
         { 1763719742123, 1 }
]]
assert(#KEYS == 3 and #ARGV == 7, 'sample_append takes 3 keys and 7 arguments')
local OVERHEAD = 48 -- bytes of an entry without its sample
local ROUNDED_UP = 1.25 -- what jemalloc may add to a node of a stream, which has as few as 3 of the largest samples
local SHARE = 64
local MOST_REMOVED = 64
local WRONG_MS = 2000 -- a process is wrong about the store's time by more than this only after a failover
local BACK_MS = 60000

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at, minute = tonumber(ARGV[3]), tonumber(ARGV[4])
if not at or math.abs(at * 1000 - now) > WRONG_MS then
  at = math.floor(now / 1000 + 0.5)
  minute = math.floor(at / 60)
end

local function size(sample) return sample == '' and 0 or math.ceil(#sample * ROUNDED_UP) + OVERHEAD end

local function held(key, appended)
  local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  return oldest and appended - oldest[2][4] or 0
end

local function remove(key, bytes)
  local removed = {}
  for place, entry in ipairs(redis.call('XRANGE', key, '-', '+', 'COUNT', MOST_REMOVED)) do
    if bytes <= 0 then break end
    removed[place] = entry[1]
    bytes = bytes - size(entry[2][6])
  end
  if #removed > 0 then redis.call('XDEL', key, unpack(removed)) end
  return bytes
end

local most = tonumber(ARGV[7])
local memory = redis.pcall('INFO', 'memory')
if type(memory) == 'string' then -- else INFO is not permitted
  local used = tonumber(string.match(memory, 'used_memory:(%d+)'))
  local limit = tonumber(string.match(memory, 'maxmemory:(%d+)'))
  if limit > 0 then
    if (used + size(ARGV[1]) + size(ARGV[2])) * 32 > limit * 31 then return { now, 0 } end
    most = limit / SHARE
  end
end

local appended = redis.call('HMGET', KEYS[3], 'seconds', 'minutes')
local in_seconds, in_minutes = held(KEYS[1], appended[1] or 0), held(KEYS[2], appended[2] or 0)
if in_seconds < 0 or in_minutes < 0 then -- the hash was lost
  redis.call('DEL', KEYS[1], KEYS[2])
  in_seconds, in_minutes = 0, 0
end
in_seconds, in_minutes = in_seconds + size(ARGV[1]), in_minutes + size(ARGV[2])
local over = in_seconds + in_minutes - most
local of_seconds = math.min(over, in_seconds - most / 2)
if of_seconds > 0 then over = over - of_seconds + remove(KEYS[1], of_seconds) end
if over > 0 then over = remove(KEYS[2], over) end
if over > 0 then return { now, 0 } end

local function append(key, name, at, sample, span_ms)
  local before = redis.call('HINCRBY', KEYS[3], name, size(sample)) - size(sample)
  local since = string.format('%.0f', now - span_ms)
  local values = { 'at', string.format('%.0f', at), 'before', string.format('%.0f', before), 'sample', sample }
  local id = redis.call('XADD', key, 'MINID', '~', since, '*', unpack(values))
  if tonumber(string.match(id, '^%d+')) > now + BACK_MS then -- the clock went back: begin both anew
    redis.call('DEL', KEYS[1], KEYS[2])
    redis.call('XADD', key, '*', unpack(values))
  end
  redis.call('PEXPIRE', key, ARGV[6])
end
append(KEYS[1], 'seconds', at, ARGV[1], ARGV[5])
if ARGV[2] ~= '' then append(KEYS[2], 'minutes', minute, ARGV[2], ARGV[6]) end
redis.call('PEXPIRE', KEYS[3], ARGV[6])
return { now, 1 }
