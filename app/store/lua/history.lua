--[[ The history of the server's state, which a script compares with the one that a node knows.

Reply    string  16 bytes: the beginning of the id of the server's replication, which changes when a replica takes over
                 and when the server starts; zeros if it is unknown
Example  history_of_server()
         '8c1e5a3b90d2f647'
]]
local UNKNOWN_HISTORY = string.rep('\0', 16)

local function history_of_server()
  local replication = redis.pcall('INFO', 'replication')
  local id = type(replication) == 'string' and string.match(replication, 'master_replid:(%x+)')
  return id and #id >= 16 and string.sub(id, 1, 16) or UNKNOWN_HISTORY
end
