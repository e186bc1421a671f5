--[[ Leases: the units that a bucket holds for them (app/domain/holds.py has the rules and the reasons).

A bucket without leases has no such state. With leases, its state continues:
State    <c16 d d>  for each lease, ordered by their ends: its name, the units held, its end (ms)
A check of a rate or a token bucket has
  holds   { { name, units, end }, ... } in that order; false if the bucket had no leases when it was loaded, so that an
          ask without leases pays for one comparison only. The next two are then not set:
  held    the units of all holds
  lapsed  the units of unsettled leases that ended before this ask, spent at their end; the next write of the bucket
          stores that
Example  a token bucket of <16, 1000> with a lease of 4 units until 1500 ms: <16, 1000> <name, 4, 1500>, 48 bytes
]]

local HELD, HELD_BYTES = '<c16dd', 32

-- The units of some holds, added from the last to the first.
local function units_of(holds, first, last)
  local units = 0
  for i = last, first, -1 do units = units + holds[i][2] end
  return units
end

local function set_holds(check, holds)
  check.holds, check.held = holds, units_of(holds, 1, #holds)
end

local function held_by(check)
  return check.holds and check.held or 0
end

local function lapsed_in(check)
  return check.holds and check.lapsed or 0
end

-- Read the holds behind the first `size` bytes of a bucket's state.
local function read_holds(check, text, size)
  local holds = {}
  for at = size + 1, #text - HELD_BYTES + 1, HELD_BYTES do
    local name, units, ends = unpack_(HELD, text, at)
    holds[#holds + 1] = { name, units, ends }
  end
  set_holds(check, holds)
end

local function packed_holds(check)
  local packed = {}
  for i, hold in ipairs(check.holds or packed) do packed[i] = pack(HELD, hold[1], hold[2], hold[3]) end
  return table.concat(packed)
end

local function move_holds(check, by)
  for _, hold in ipairs(check.holds) do hold[3] = hold[3] + by end
end

-- When the last lease ends; -huge if all of them are over.
local function last_end(check)
  local last = check.holds[#check.holds]
  return last and last[3] or -huge
end

-- Leave out the leases that ended by now; returns all holds as they were, and how many ended.
local function end_holds(check)
  local holds, over, rest = check.holds, 0, {}
  while over < #holds and holds[over + 1][3] <= check.t do over = over + 1 end
  for i = over + 1, #holds do rest[#rest + 1] = holds[i] end
  check.lapsed = units_of(holds, 1, over)
  set_holds(check, rest)
  return holds, over
end

-- Hold units from now on, behind the leases that end no later.
local function add_hold(check, name, units, lease_ms)
  if not check.holds then check.holds, check.lapsed = {}, 0 end
  local holds, ends = check.holds, check.t + lease_ms
  local at = #holds + 1
  while at > 1 and holds[at - 1][3] > ends do at = at - 1 end
  table.insert(holds, at, { name, units, ends })
  set_holds(check, holds)
end

-- End a lease; returns the units that it held, or nil if the bucket does not hold any for it.
local function remove_hold(check, name)
  for i, hold in ipairs(check.holds or {}) do
    if hold[1] == name then
      table.remove(check.holds, i)
      set_holds(check, check.holds)
      return hold[2]
    end
  end
  return nil
end
