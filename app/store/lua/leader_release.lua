--[[ Gives a lease up, if the contender still holds it.

KEYS[1]  string  the lease: its owner
ARGV[1]  string  the contender
Reply    1 if it held the lease, else 0
Example  EVAL ... 1 qg1:volumes:lease host-1/7
         1
]]
assert(#KEYS == 1 and #ARGV == 1, 'leader_release takes 1 key and 1 argument')
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
