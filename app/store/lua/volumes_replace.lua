--[[ Replaces the record of the throttle factor, if it is still the one that was read and the writer may write.

KEYS[1]  string  the record, msgpack of app.domain.volumes.FactorState
KEYS[2]  string  the newest fencing token of the lease
ARGV[1]  bytes   the record as it was read; '' for none
ARGV[2]  bytes   the new record
ARGV[3]  string  the writer's fencing token; '' if it needs none
Reply    'written'; 'fenced' if another token is the newest; 'changed' if the record is no longer the one that was read
Example  EVAL ... 2 qg1:volumes qg1:volumes:token '' RECORD 3
         'written', if 3 is the newest token and there was no record
]]
assert(#KEYS == 2 and #ARGV == 3, 'volumes_replace takes 2 keys and 3 arguments')
if ARGV[3] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[3] then return 'fenced' end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 'changed' end
redis.call('SET', KEYS[1], ARGV[2])
return 'written'
