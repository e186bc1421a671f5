--[[ Deletes entries from the stream of the decision log once they are in files, and counts their rows.

Only entries that were still there are counted, so that none is counted twice.

KEYS[1]  stream  batches of the decision log
KEYS[2]  hash    the writer's status: adds to `written` and `unreadable`
ARGV[1]  string  the consumer group
ARGV[2]  integer TTL of the status (ms)
ARGV[3..] for each entry: its id (string), rows written (count), rows that could not be read (count)
Reply    nil
Example  EVAL ... 2 qg1:log qg1:log:standing decision-log 604800000 1763719742123-0 250 0
         nil; the status' `written` grew by 250
]]
assert(#KEYS == 2 and #ARGV >= 2 and #ARGV % 3 == 2, 'log_acknowledge takes 2 keys, 2 arguments and 3 for each entry')
local written, unreadable = 0, 0
for at = 3, #ARGV, 3 do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[at])
  if redis.call('XDEL', KEYS[1], ARGV[at]) == 1 then
    written = written + tonumber(ARGV[at + 1])
    unreadable = unreadable + tonumber(ARGV[at + 2])
  end
end
redis.call('HINCRBY', KEYS[2], 'written', written)
redis.call('HINCRBY', KEYS[2], 'unreadable', unreadable)
redis.call('PEXPIRE', KEYS[2], ARGV[2])
