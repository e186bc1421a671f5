--[[ Adds a batch of counts of shadow quotas, once.

A batch that was added before is not added again, so that a process can repeat it when it got no reply. Nothing is
added in the last 1/32 of the store's memory, which is left to leases, the factor and the examination.

KEYS[1]  hash    `last`: the number of the last batch of the process
KEYS[2...]  hash the counts of a shadow quota: `admit`, `delay`, `throttle`, `reject`
ARGV[1]  integer the number of this batch
ARGV[2]  integer the TTL of counts (ms)
ARGV[3]  integer the TTL of the number of a batch (ms)
ARGV[4...] integer four counts for each quota, in the order of the fields
Reply    1 if the batch is added, now or before; 0 if there is no room
Example  EVAL ... 2 qg1:overview:batch:host-7-5d41402a qg1:overview:shadow:DIGEST 1 7776000000 86400000 9 0 2 0
         1
]]
local FIELDS = { 'admit', 'delay', 'throttle', 'reject' }
assert(#ARGV == 3 + #FIELDS * (#KEYS - 1), 'shadow_add takes 3 arguments, and 4 for each key after the first')
local last = redis.call('HMGET', KEYS[1], 'last')[1]
if last and tonumber(last) >= tonumber(ARGV[1]) then return 1 end
local memory = redis.pcall('INFO', 'memory')
if type(memory) == 'string' then -- else INFO is not permitted
  local used = tonumber(string.match(memory, 'used_memory:(%d+)'))
  local limit = tonumber(string.match(memory, 'maxmemory:(%d+)'))
  if limit > 0 and used * 32 > limit * 31 then return 0 end
end
for place = 2, #KEYS do
  for index, field in ipairs(FIELDS) do
    local count = ARGV[3 + #FIELDS * (place - 2) + index]
    if count ~= '0' then redis.call('HINCRBY', KEYS[place], field, count) end
  end
  redis.call('PEXPIRE', KEYS[place], ARGV[2])
end
redis.call('HSET', KEYS[1], 'last', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
