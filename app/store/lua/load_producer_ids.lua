-- Loading ids and charges (app/domain/loading.py says what and why); follows producer_ids.lua, in its function.

local ID, CHARGE = '<I4I4I4I4I4I4I4I4dd', '<dd'
local ID_BYTES, CHARGE_BYTES = 48, 16

-- The oldest live layer that was open at a time or began after it.
local function covering(part, at)
  for number = max(part.number - LAYERS + 1, 1), part.number do
    if is_live(part, number) and at - part.starts[number % LAYERS] < part.interval then return number end
  end
end

local function load_id(part, id, at, layer)
  local begins = max(layer, at - part.interval + 1)
  if part.t - begins >= part.layer_ttl then return OVER end
  local segment, number = find(part, id)
  if segment and at - part.starts[number % LAYERS] < part.interval then return THERE end
  if not segment and remembered(part) >= max_ids then return NO_ROOM end
  if segment then
    local counts = part.segments[segment].counts
    counts[number % LAYERS] = max(counts[number % LAYERS] - 1, 0)
  end
  local into = covering(part, at)
  if not into then
    if is_live(part, part.number) then begins = max(begins, part.starts[part.number % LAYERS] + part.interval) end
    into = begin_layer(part, begins)
  end
  part.base, part.last = part.base or at, part.last or at -- not by the present time: twice is as once
  write(part, id, into)
  return ADDED
end

function producer_ids.load_ids(part, packed, from, count, became)
  for at = from, from + (count - 1) * ID_BYTES, ID_BYTES do
    local id = { unpack_(ID, packed, at) }
    local result = load_id(part, id, id[9], id[10])
    became[result] = became[result] + 1
  end
  if part.dirty then write_head(part) end
end

-- How many charges of the ring, from one on, are before a time.
local function before(part, at, from)
  local after = part.charges
  if from < after and at > part.last then return after end
  while from < after do
    local middle = floor((from + after) / 2)
    if charged_at(part, middle) < at then from = middle + 1 else after = middle end
  end
  return from
end

local function ring_slice(part, from, n)
  if n == 0 then return '' end
  local place = (part.first + from) % part.capacity
  local straight = min(n, part.capacity - place)
  local text = call('GETRANGE', part.key, part.ring + place * 4, part.ring + (place + straight) * 4 - 1)
  if straight < n then text = text .. call('GETRANGE', part.key, part.ring, part.ring + (n - straight) * 4 - 1) end
  return text
end

local function ring_put(part, from, text)
  local place = (part.first + from) % part.capacity
  local straight = (part.capacity - place) * 4
  set_range(part.key, part.ring + place * 4, string.sub(text, 1, straight))
  if #text > straight then set_range(part.key, part.ring, string.sub(text, straight + 1)) end
end

-- Put charges between those of the ring: wanted are { after so many of them, time, how many }, in order.
local function insert(part, wanted, total)
  part.base = part.base or wanted[1][2]
  local charges = part.charges
  make_room(part, total)
  local dropped, newest = charges - part.charges, wanted[#wanted][2]
  if part.changed then lay_out(part) end
  local first = wanted[1][1] - dropped
  local rest, pieces, taken = ring_slice(part, first, part.charges - first), {}, 0
  for _, w in ipairs(wanted) do
    local upto = (w[1] - dropped - first) * 4
    pieces[#pieces + 1] = string.sub(rest, taken + 1, upto)
    pieces[#pieces + 1] = string.rep(pack('<I4', (w[2] - part.base) % WORD), w[3])
    taken = upto
  end
  pieces[#pieces + 1] = string.sub(rest, taken + 1)
  ring_put(part, first, table.concat(pieces))
  part.last = part.charges > 0 and max(part.last, newest) or newest
  part.charges = part.charges + total
  write_head(part)
end

function producer_ids.load_charges(part, packed, from, count, became)
  local wanted, total, place = {}, 0, 0
  for i = from, from + (count - 1) * CHARGE_BYTES, CHARGE_BYTES do
    local at, ids = unpack_(CHARGE, packed, i)
    if part.t - at >= part.window then
      became[OVER] = became[OVER] + ids
    else
      local first = before(part, at, place)
      place = first
      if first < part.charges and charged_at(part, first) == at then place = before(part, at + 1, first) end
      local missing = max(ids - (place - first), 0)
      became[THERE] = became[THERE] + ids - missing
      if missing > 0 then wanted[#wanted + 1] = { place, at, missing } end
      total = total + missing
    end
  end
  -- where there is no room, the newest
  local excess = total - max(max_ids - charged(part), 0)
  while excess > 0 do
    local cut = min(wanted[1][3], excess)
    wanted[1][3], excess, total = wanted[1][3] - cut, excess - cut, total - cut
    became[NO_ROOM] = became[NO_ROOM] + cut
    if wanted[1][3] == 0 then table.remove(wanted, 1) end
  end
  became[ADDED] = became[ADDED] + total
  if total > 0 then
    part.last = part.last or wanted[1][2]
    insert(part, wanted, total)
  end
end
