--[[ Removes buckets and takes a number in the order of the decision log, in one step; follows order.lua.

For a bucket that nodes may remember, a number is left: ids that a node learned before are not renewed (decide.lua).

KEYS, in order
         string  ARGV[1] buckets to remove; there may be none
         string  for some of them the number of their last reset (TTL: ARGV[2], ARGV[3], ...)
         string  the number of the last reset of any bucket (order.lua)
         string  only if decisions are logged: the number of the last call that was logged (order.lua)
ARGV[1]  how many buckets (count)
ARGV[n]  n >= 2: how long a node may know the bucket's ids (ms)
Reply    the number in the order of the log as text; '0' if nothing is logged, or if the store takes no writes
Example  EVAL ... 4 qg1:{user=alice}:producer_ids_rate:... qg1:{user=alice}:producer_ids_rate:...:reset qg1:resets qg1:order
           1 4860000
         '1763719742000123', and the bucket is gone
]]
local buckets, marks = tonumber(ARGV[1]), #ARGV - 1
assert(buckets and #KEYS - buckets - marks >= 1 and #KEYS - buckets - marks <= 2,
  'forget takes buckets, numbers of resets, the last reset and the order')
if marks > 0 then
  local number = string.format('%.0f', next_order(KEYS[buckets + marks + 1]))
  for i = 1, marks do redis.pcall('SET', KEYS[buckets + i], number, 'PX', ARGV[i + 1]) end
end
for i = 1, buckets do redis.call('DEL', KEYS[i]) end
local order = KEYS[buckets + marks + 2]
return order and string.format('%.0f', next_order(order)) or '0'
