--[[ Puts a batch of the decision log into the stream, if there is room, and notes that its node is alive.

Entries that were written to files are deleted, so the length of the stream counts unread batches. No unread batch is
dropped for a newer one. The last 1/32 of the store's memory is left to leases, the factor and the examination: above
maxmemory the store would refuse them, and the worker that empties the stream could not take its lease.

KEYS[1]  stream  batches: each entry has the fields `rows` and `batch`
KEYS[2]  hash    the heartbeat: by node, 'NUMBER:AT_MS' of its newest batch
ARGV[1]  integer the most batches that the stream may hold (count)
ARGV[2]  integer rows of the batch (count)
ARGV[3]  bytes   the batch, msgpack of app.decision_log.batch.Batch
ARGV[4]  integer TTL of both keys (ms)
ARGV[5]  string  the node
ARGV[6]  integer the number of the batch among the node's
Reply    1 if the stream took it, 0 if it is full
Example  EVAL ... 2 qg1:log qg1:log:nodes 4096 250 BATCH 34560000000 node-1 7
         1, and the heartbeat has node-1 = '7:1763719742123'
]]
assert(#KEYS == 2 and #ARGV == 6, 'log_append takes 2 keys and 6 arguments')
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
local memory = redis.pcall('INFO', 'memory')
if type(memory) == 'string' then -- else INFO is not permitted
  local used, most = string.match(memory, 'used_memory:(%d+)'), string.match(memory, 'maxmemory:(%d+)')
  if tonumber(most) > 0 and (used + #ARGV[3]) * 32 > most * 31 then return 0 end
end
redis.call('XADD', KEYS[1], '*', 'rows', ARGV[2], 'batch', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[2], ARGV[5], ARGV[6] .. ':' .. now)
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
