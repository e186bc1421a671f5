--[[ Notes that a writer of the decision log is alive, and its failures.

KEYS[1]  hash    the writer's status: sets `seen_ms` and `error`, adds to `failures`
ARGV[1]  integer TTL of the status (ms)
ARGV[2]  integer failures since the last heartbeat (count)
ARGV[3]  string  why files cannot be written now, in one word; '' if they can
Reply    nil
Example  EVAL ... 1 qg1:log:standing 604800000 1 full
         nil; the status has error = 'full'
]]
assert(#KEYS == 1 and #ARGV == 3, 'log_heartbeat takes 1 key and 3 arguments')
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'seen_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
redis.call('HINCRBY', KEYS[1], 'failures', ARGV[2])
redis.call('HSET', KEYS[1], 'error', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
