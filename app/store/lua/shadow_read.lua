--[[ Reads the counts of shadow quotas.

KEYS[1...] hash  the counts of a shadow quota (shadow_add.lua)
Reply    { now (ms since 1970), { admit, delay, throttle, reject }, ... }; a count that was never made is nil
Example  EVAL ... 1 qg1:overview:shadow:DIGEST
         { 1763719742123, { '9', nil, '2', nil } }
]]
local time = redis.call('TIME')
local found = { time[1] * 1000 + math.floor(time[2] / 1000) }
for place, key in ipairs(KEYS) do
  found[place + 1] = redis.call('HMGET', key, 'admit', 'delay', 'throttle', 'reject')
end
return found
