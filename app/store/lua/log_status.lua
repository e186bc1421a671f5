--[[ Reads the status of the decision log, and drops nodes from the heartbeat that have been silent too long.

Of the unread entries only the id of the oldest leaves the store.

KEYS[1]  stream  batches of the decision log
KEYS[2]  hash    the writer's status: seen_ms (ms since 1970), written, unreadable, failures (counts), error (one word)
KEYS[3]  hash    the heartbeat: by node, 'NUMBER:AT_MS' of its newest batch
ARGV[1]  integer how long a silent node stays in the heartbeat (ms)
Reply    { now as text (ms since 1970), unread entries (count), id of the oldest or '', seen_ms, written, unreadable,
           failures, error (each '' if not set), { node, 'NUMBER:AT_MS', ... } }
Example  EVAL ... 3 qg1:log qg1:log:standing qg1:log:nodes 600000
         { '1763719742123', 0, '', '1763719741000', '250', '0', '0', '', { 'node-1', '7:1763719740000' } }
]]
assert(#KEYS == 3 and #ARGV == 1, 'log_status takes 3 keys and 1 argument')
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local rest = redis.call('HMGET', KEYS[2], 'seen_ms', 'written', 'unreadable', 'failures', 'error')
for at = 1, 5 do rest[at] = rest[at] or '' end
local nodes, alive = redis.call('HGETALL', KEYS[3]), {}
for at = 1, #nodes, 2 do
  if now - tonumber(string.match(nodes[at + 1], ':(.*)$')) > tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[3], nodes[at])
  else
    alive[#alive + 1] = nodes[at]
    alive[#alive + 1] = nodes[at + 1]
  end
end
rest[6] = alive
return { now, redis.call('XLEN', KEYS[1]), oldest and oldest[1] or '', unpack(rest) }
