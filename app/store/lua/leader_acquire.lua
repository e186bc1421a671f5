--[[ Takes a lease, or extends it for the contender that holds it.

KEYS[1]  string  the lease: its owner (TTL: how long the lease lasts)
KEYS[2]  string  the newest fencing token (count; no TTL)
ARGV[1]  string  the contender
ARGV[2]  integer how long the lease lasts unless it is extended (ms)
Reply    { token as text, '0' if another contender holds the lease; the store's time as text (ms since 1970) }
Example  EVAL ... 2 qg1:volumes:lease qg1:volumes:token host-1/7 10000
         { '1', '1763719742123' }; asked again by host-2/9: { '0', '1763719743000' }
]]
assert(#KEYS == 2 and #ARGV == 2, 'leader_acquire takes 2 keys and 2 arguments')
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return { '0', now } end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if owner then return { redis.call('GET', KEYS[2]) or tostring(redis.call('INCR', KEYS[2])), now } end
return { tostring(redis.call('INCR', KEYS[2])), now }
