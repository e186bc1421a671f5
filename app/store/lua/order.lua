--[[ Takes the next number in the order of the decision log.

key      string  the number of the last call that was logged (TTL LONGEST_TTL_MS)
clock    { seconds, microseconds } as TIME returned them, or nil if it was not asked yet
Returns  the clock's microseconds, or one more than the last number if that is not behind them; 0 if the store takes no
         writes. So the numbers grow even in a store that lost the last ones (a replica that lagged) or all of them,
         and no two calls share one.
Example  at 1763719742.000123 s with 5 as the last number: 1763719742000123; then, in the same microsecond, ...124
]]
local function next_order(key, clock)
  clock = clock or redis.call('TIME')
  local order = clock[1] * 1000000 + clock[2]
  local last = redis.pcall('SET', key, order, 'PX', LONGEST_TTL_MS, 'GET')
  if type(last) == 'table' then return 0 end
  last = last and tonumber(last) or 0
  if last < order then return order end
  redis.call('SET', key, last + 1, 'PX', LONGEST_TTL_MS)
  return last + 1
end
