-- The next number in the order of what is logged: the clock's microseconds, or one more than the last where that
-- is not behind them. So it goes on growing in a store that has lost it, or some of the last ones (a replica that
-- lagged), and two calls never share one. 0 from a store that takes no writes. `clock` is what TIME said, if asked.
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
