--[[ Loads ids and charges (app/domain/loading.py has the rules); follows producer_ids.lua in its maker function.

check    the bucket as producer_ids.load left it: KEYS[n] of load.lua
packed   items from position `from` on, `count` of them:
           kind 1, ids:      struct <I4 x 8, d d> spread, written at (ms), begin of its layer (ms)
           kind 2, charges:  struct <d d> time (ms), ids (count)
tally    counts the results: ADDED, THERE, OVER, NO_ROOM
Example  charges <1000 ms, 3 ids> onto a ring with 2 charges at 1000: 1 is ADDED, 2 were THERE
]]

local ID, CHARGE = '<I4I4I4I4I4I4I4I4dd', '<dd'
local ID_BYTES, CHARGE_BYTES = 48, 16

-- The oldest live layer that was open at a time, or began after it.
local function covering(check, at)
  for number = max(check.number - LAYERS + 1, 1), check.number do
    if is_live(check, number) and at - check.starts[number % LAYERS] < check.interval then return number end
  end
end

local function load_id(check, id, at, layer)
  local begins = max(layer, at - check.interval + 1)
  if check.t - begins >= check.layer_ttl then return OVER end
  local segment, number = find(check, id)
  if segment and at - check.starts[number % LAYERS] < check.interval then return THERE end
  if not segment and remembered(check) >= max_ids then return NO_ROOM end
  if segment then
    local counts = check.segments[segment].counts
    counts[number % LAYERS] = max(counts[number % LAYERS] - 1, 0)
  end
  local into = covering(check, at)
  if not into then
    if is_live(check, check.number) then begins = max(begins, check.starts[check.number % LAYERS] + check.interval) end
    into = begin_layer(check, begins)
  end
  check.base, check.last = check.base or at, check.last or at -- not now: a repeated load must change nothing
  write(check, id, into)
  return ADDED
end

function producer_ids.load_ids(check, packed, from, count, tally)
  for at = from, from + (count - 1) * ID_BYTES, ID_BYTES do
    local id = { unpack_(ID, packed, at) }
    local result = load_id(check, id, id[9], id[10])
    tally[result] = tally[result] + 1
  end
  if check.dirty then write_head(check) end
end

-- The place of the first charge of the ring, at or after `from`, that is not before a time.
local function before(check, at, from)
  local after = check.charges
  if from < after and at > check.last then return after end
  while from < after do
    local middle = floor((from + after) / 2)
    if charged_at(check, middle) < at then from = middle + 1 else after = middle end
  end
  return from
end

local function ring_slice(check, from, n)
  if n == 0 then return '' end
  local place = (check.first + from) % check.capacity
  local straight = min(n, check.capacity - place)
  local text = call('GETRANGE', check.key, check.ring + place * 4, check.ring + (place + straight) * 4 - 1)
  if straight < n then text = text .. call('GETRANGE', check.key, check.ring, check.ring + (n - straight) * 4 - 1) end
  return text
end

local function ring_put(check, from, text)
  local place = (check.first + from) % check.capacity
  local straight = (check.capacity - place) * 4
  set_range(check.key, check.ring + place * 4, string.sub(text, 1, straight))
  if #text > straight then set_range(check.key, check.ring, string.sub(text, straight + 1)) end
end

-- Insert charges into the ring. `wanted` lists { how many charges precede, time, count }, in order.
local function insert(check, wanted, total)
  check.base = check.base or wanted[1][2]
  local charges = check.charges
  make_room(check, total)
  local dropped, newest = charges - check.charges, wanted[#wanted][2]
  if check.changed then lay_out(check) end
  local first = wanted[1][1] - dropped
  local rest, pieces, taken = ring_slice(check, first, check.charges - first), {}, 0
  for _, w in ipairs(wanted) do
    local upto = (w[1] - dropped - first) * 4
    pieces[#pieces + 1] = string.sub(rest, taken + 1, upto)
    pieces[#pieces + 1] = string.rep(pack('<I4', (w[2] - check.base) % WORD), w[3])
    taken = upto
  end
  pieces[#pieces + 1] = string.sub(rest, taken + 1)
  ring_put(check, first, table.concat(pieces))
  check.last = check.charges > 0 and max(check.last, newest) or newest
  check.charges = check.charges + total
  write_head(check)
end

function producer_ids.load_charges(check, packed, from, count, tally)
  local wanted, total, place = {}, 0, 0
  for i = from, from + (count - 1) * CHARGE_BYTES, CHARGE_BYTES do
    local at, ids = unpack_(CHARGE, packed, i)
    if check.t - at >= check.window then
      tally[OVER] = tally[OVER] + ids
    else
      local first = before(check, at, place)
      place = first
      if first < check.charges and charged_at(check, first) == at then place = before(check, at + 1, first) end
      local missing = max(ids - (place - first), 0)
      tally[THERE] = tally[THERE] + ids - missing
      if missing > 0 then wanted[#wanted + 1] = { place, at, missing } end
      total = total + missing
    end
  end
  -- if not all fit, keep the newest
  local excess = total - max(max_ids - charged(check), 0)
  while excess > 0 do
    local cut = min(wanted[1][3], excess)
    wanted[1][3], excess, total = wanted[1][3] - cut, excess - cut, total - cut
    tally[NO_ROOM] = tally[NO_ROOM] + cut
    if wanted[1][3] == 0 then table.remove(wanted, 1) end
  end
  tally[ADDED] = tally[ADDED] + total
  if total > 0 then
    check.last = check.last or wanted[1][2]
    insert(check, wanted, total)
  end
end
