--[[ Reads the next samples of both series.

KEYS[1]  stream  the series by the second (sample_append.lua)
KEYS[2]  stream  the series by the minute
ARGV[1]  string  the id of the last entry that was read of the first, after '('; '-' for all
ARGV[2]  string  the same of the second
ARGV[3]  integer the most samples of each (count)
Reply    { now (ms since 1970), { {id, {'at', AT, 'before', BYTES, 'sample', SAMPLE}}, ... }, the same of the second }
Example  EVAL ... 2 qg1:overview:seconds qg1:overview:minutes - - 100
         { 1763719742123, { { '1763719742123-0', { 'at', '1763719742', 'before', '0', 'sample', SAMPLE } } }, {} }
]]
assert(#KEYS == 2 and #ARGV == 3, 'samples_read takes 2 keys and 3 arguments')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local seconds = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[3])
return { now, seconds, redis.call('XRANGE', KEYS[2], ARGV[2], '+', 'COUNT', ARGV[3]) }
