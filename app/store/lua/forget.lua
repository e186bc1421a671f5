--[[ Removes buckets and takes a number in the order of the decision log, in one step; follows order.lua.

KEYS[1..n-1]  string  buckets to remove; there may be none
KEYS[n]       string  the number of the last call that was logged (order.lua)
ARGV          none
Reply         the number as text; '0' if the store takes no writes
Example       EVAL ... 2 qg1:{user=alice}:request_rate:... qg1:order
              '1763719742000123', and the bucket is gone
]]
assert(#KEYS >= 1 and #ARGV == 0, 'forget takes the key of the order last, and no arguments')
for i = 1, #KEYS - 1 do redis.call('DEL', KEYS[i]) end
return string.format('%.0f', next_order(KEYS[#KEYS]))
