--[[ Reads the record of the throttle factor and the drill at one moment, with the store's time.

KEYS[1]  string  the record, msgpack of app.domain.volumes.FactorState
KEYS[2]  string  the drill, msgpack of app.domain.volumes.Drill
ARGV     none
Reply    { { seconds, microseconds } since 1970, { record or nil, drill or nil } }
Example  EVAL ... 2 qg1:volumes qg1:volumes:drill
         { { '1763719742', '123456' }, { nil, nil } }
]]
assert(#KEYS == 2 and #ARGV == 0, 'volumes_read takes 2 keys and no arguments')
return { redis.call('TIME'), redis.call('MGET', KEYS[1], KEYS[2]) }
