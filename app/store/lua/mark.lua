--[[ Reads the values by which a node detects a lost state or a reset of a bucket; follows history.lua.

KEYS[1]  string  the birth of the store's state, without the history; made here if it is missing (TTL LONGEST_TTL_MS)
KEYS[2]  string  the number of the last reset of any bucket (forget.lua)
ARGV[1]  the birth to write if it is missing: random bytes, so that no two are the same
Reply    { { seconds, microseconds } since 1970, the birth with the history (empty if it is missing and cannot be
         written), the number of the last reset as text ('0' without one) }
Example  EVAL ... 2 qg1:birth qg1:resets 5f0c...
         { { '1763719742', '123456' }, '5f0c...8c1e5a3b90d2f647', '0' }
]]
assert(#KEYS == 2 and #ARGV == 1, 'mark takes 2 keys and a birth')
local birth = redis.call('GET', KEYS[1])
if not birth then
  local wrote = redis.pcall('SET', KEYS[1], ARGV[1], 'PX', LONGEST_TTL_MS)
  birth = wrote.ok and ARGV[1]
end
return { redis.call('TIME'), birth and birth .. history_of_server() or '', redis.call('GET', KEYS[2]) or '0' }
