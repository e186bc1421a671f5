#!lua flags=allow-oom
--[[ Proves that a script may write, and leaves nothing; in a full store too, like the script that decides.

KEYS[1]  string  the probe; removed before the script ends
ARGV     none
Reply    1
Example  EVAL ... 1 qg1:probe
         1
]]
assert(#KEYS == 1 and #ARGV == 0, 'probe takes 1 key and no arguments')
redis.call('SET', KEYS[1], '', 'PX', 1000)
return redis.call('DEL', KEYS[1])
