--[[ Layered Bloom filters and the exact trailing count (app/domain/producer_ids.py has the rules and the reasons).

KEYS     string  one bucket; TTL: until its newest layer and its newest charge are over
ARGV     window (ms), interval (ms), ttl of a layer (ms); they arrive as the three parameters of a quota (call.lua),
         and the spread of each id after it: 32 bytes, eight I4
State    <d d I4 d d d d I4 I4 I4 I4>  base time (ms), time of the newest charge (ms), number of the newest layer, start
                         times of the four layers (ms; slot = number mod 4), ring: capacity, first, charges (counts);
                         segments (count)
         <I4 B B I4 I4 I4 I4 I4 I4>  for each segment, oldest first: ids a layer, share, hashes, blocks, the layer
                         written last, ids by the newest layer that holds them (by slot);
                         a segment dropped in place has no hashes; there is room for 4, 16, 64, ... of these
         segments        blocks of 256 bytes: <I4> number of the layer that wrote it last, then 504 cells of 4 bits,
                         one bit for each slot; cell 2i is the low half of byte i
         ring            <I4> for each charge: its time less the base, mod 2^32 (kept charges span less than that)
         The next write of a block clears the layers that ended since its last write; readers mask them.
         When the layout changes, the key is written whole by one SET, since growing in place doubles a small
         allocation. A large key would take long to copy, and grows by 1 MiB only: new segments take the place of the
         ring, which moves to the end.
Example  limit 3 ids a window of 60000 ms, two charges at 0 ms in the ring: one id more at 1000 ms is admitted, sets its
         bits in the open layer and adds a charge, 1000 less the base. A fourth waits until 60000 ms
]]

local HEAD, SEGMENT, BLOCK = '<ddI4ddddI4I4I4I4', '<I4BBI4I4I4I4I4I4', '<' .. string.rep('I4', 64)
local HEAD_BYTES, SEGMENT_BYTES, WORD = 68, 30, 4294967296
local USUAL_HEAD_END = '187' -- the last byte of a head with room for four segments
local SPREAD = '<I4I4I4I4I4I4I4I4'
local LARGE = 4194304
local PIECE = 65536
local spare_id = {} -- takes the words of the next id, until a list keeps it
local producer_ids = {}

-- How many segments the head has room for, in a key with this many segments.
local function room_for(segments)
  local room = 4
  while room < segments do room = room * 4 end
  return room
end

local function shorten(list, length)
  for i = #list, length + 1, -1 do list[i] = nil end
end

-- The i-th segment of the key as the head describes it, in a table that the check used for an earlier ask.
local function entry_at(check, packed, i, offset)
  local s = check.spare[i] or { counts = {} }
  check.spare[i] = s
  local counts = s.counts
  s.ids, s.share, s.hashes, s.blocks, s.written, counts[0], counts[1], counts[2], counts[3] =
    unpack_(SEGMENT, packed, HEAD_BYTES + (i - 1) * SEGMENT_BYTES + 1)
  s.offset = offset
  return s
end

function producer_ids.load(check, window, interval, layer_ttl, ids, ids_at)
  check.window, check.interval, check.layer_ttl, check.ids, check.ids_at = window, interval, layer_ttl, ids, ids_at
  check.looked_up, check.alive, check.changed, check.dirty, check.id_outcomes = false, false, false, false, false
  check.missing, check.holds = -1, false
  if not check.starts then
    check.starts, check.entries, check.segments, check.spare, check.unseen, check.stale = {}, {}, {}, {}, {}, {}
  end
  local starts, entries, segments = check.starts, check.entries, check.segments
  local packed = call('GETRANGE', check.key, '0', USUAL_HEAD_END)
  if #packed < HEAD_BYTES then
    check.base, check.last, check.number, check.newest = false, false, 0, false
    starts[0], starts[1], starts[2], starts[3] = 0, 0, 0, 0
    check.capacity, check.old_capacity, check.first, check.charges, check.room, check.ring = 0, 0, 0, 0, 0, 0
    shorten(entries, 0)
    shorten(segments, 0)
    return
  end
  local many
  check.base, check.last, check.number, starts[0], starts[1], starts[2], starts[3], check.capacity, check.first,
    check.charges, many = unpack_(HEAD, packed)
  check.room, check.old_capacity = room_for(many), check.capacity
  local offset = HEAD_BYTES + check.room * SEGMENT_BYTES
  if #packed < offset then packed = call('GETRANGE', check.key, 0, offset - 1) end
  local live = 0
  for i = 1, many do
    local s = entry_at(check, packed, i, offset)
    entries[i] = s
    if s.hashes > 0 then
      live = live + 1
      segments[live] = s
    end
    offset = offset + s.blocks * BLOCK_BYTES
  end
  shorten(entries, many)
  shorten(segments, live)
  check.ring = offset
  check.newest = -huge
  if check.number > 0 then check.newest = starts[check.number % LAYERS] end
  if check.charges > 0 then check.newest = max(check.newest, check.last) end
end

function producer_ids.clock_window(check)
  return check.window
end

local function head_of(check)
  local starts = check.starts
  local packed = pack(HEAD, check.base, check.last, check.number, starts[0], starts[1], starts[2], starts[3],
    check.capacity, check.first, check.charges, #check.entries)
  for _, s in ipairs(check.entries) do
    packed = packed .. pack(SEGMENT, s.ids, s.share, s.hashes, s.blocks, s.written,
      s.counts[0], s.counts[1], s.counts[2], s.counts[3])
  end
  return packed
end

local function lasts(check)
  local dies = -huge
  if check.number > 0 then dies = check.starts[check.number % LAYERS] + check.layer_ttl end
  if check.charges > 0 then dies = max(dies, check.last + check.window) end
  return dies - now
end

local function write_head(check)
  set_range(check.key, '0', head_of(check))
  call('PEXPIRE', check.key, ttl(lasts(check)))
end

-- The time of the i-th charge, oldest first, from 0.
local function charged_at(check, i)
  if i == check.charges - 1 then return check.last end
  local at = check.ring + (check.first + i) % check.capacity * 4
  local entry = unpack_('<I4', call('GETRANGE', check.key, at, at + 3))
  return check.last - (check.last - check.base - entry) % WORD
end

local function count_charged(check)
  if check.charges == 0 or check.t - check.last >= check.window then return 0 end
  local dead, alive = 0, check.charges - 1
  if check.t - charged_at(check, 0) < check.window then return check.charges end
  while alive - dead > 1 do
    local middle = floor((dead + alive) / 2)
    if check.t - charged_at(check, middle) < check.window then alive = middle else dead = middle end
  end
  return check.charges - alive
end

-- How many charges lie in the trailing window; they are in order of time. Counted once for each ask.
local function charged(check)
  check.alive = check.alive or count_charged(check)
  return check.alive
end

local function is_live(check, number)
  return number > 0 and number > check.number - LAYERS and check.t - check.starts[number % LAYERS] < check.layer_ttl
end

local function open_layer(check)
  if check.number > 0 and check.t - check.starts[check.number % LAYERS] < check.interval then return check.number end
end

local function remembered_by(check, number)
  local ids = 0
  local segments, slot = check.segments, number % LAYERS
  for i = 1, #segments do ids = ids + segments[i].counts[slot] end
  return ids
end

-- How many ids the live layers hold, and how many layers these are.
local function remembered(check)
  local ids, layers = 0, 0
  for number = max(check.number - LAYERS + 1, 1), check.number do
    if is_live(check, number) then ids, layers = ids + remembered_by(check, number), layers + 1 end
  end
  return ids, layers
end

local function block_of(s, id)
  return s.offset + floor(id[1] * s.blocks / WORD) * BLOCK_BYTES
end

-- The slots whose bits are set in all cells of an id. The first few cells rule out most unknown ids.
local function slots_of(s, id, block)
  local slots, left = 15, s.hashes
  for word = 2, 8 do
    local fraction = id[word] / WORD
    for _ = 1, left < 3 and left or 3 do
      fraction = fraction * CELLS
      local rest = fraction % 1
      local cell = fraction - rest
      local odd = cell % 2
      local pair = byte(block, 5 + (cell - odd) / 2)
      slots = band(slots, odd == 0 and pair or (pair - pair % 16) / 16)
      if slots == 0 then return 0 end
      fraction = rest
    end
    left = left - 3
  end
  return slots
end

-- Where an id is remembered: the place of the newest segment that holds it, and the newest live layer there.
local function find(check, id)
  for i = #check.segments, 1, -1 do
    local s = check.segments[i]
    local at = block_of(s, id)
    local block = call('GETRANGE', check.key, at, at + BLOCK_BYTES - 1)
    local slots = slots_of(s, id, block)
    if slots > 0 then
      local written = unpack_('<I4', block)
      for number = written, max(written - LAYERS + 1, 1), -1 do
        if band(slots, lshift(1, number % LAYERS)) > 0 and is_live(check, number) then return i, number end
      end
    end
  end
end

local function zeros(n)
  if n == 0 then return '' end
  local text = '\0'
  while #text * 2 <= n do text = text .. text end
  return text .. string.sub(text, 1, n - #text)
end

-- The entries of the live charges, oldest first, in pieces: one copy of megabytes costs more than many small ones.
local function ring_of(check)
  local pieces = {}
  local function read(from, entries)
    for at = from, from + entries * 4 - 1, PIECE do
      pieces[#pieces + 1] = call('GETRANGE', check.key, at, min(at + PIECE, from + entries * 4) - 1)
    end
  end
  if check.charges > 0 then
    local straight = min(check.charges, check.old_capacity - check.first)
    read(check.ring + check.first * 4, straight)
    read(check.ring, check.charges - straight)
  end
  return pieces
end

-- Assign every segment its place in the key; returns where they end.
local function place(check)
  local at = HEAD_BYTES + check.room * SEGMENT_BYTES
  for _, s in ipairs(check.entries) do
    s.offset = at
    at = at + s.blocks * BLOCK_BYTES
  end
  return at
end

-- Write the whole key: its head, the segments that stay and, if it is small, new empty ones and the ring.
local function rewrite(check, ring, is_small)
  local packed = { '' }
  for _, s in ipairs(check.segments) do
    local bytes = s.blocks * BLOCK_BYTES
    if s.offset then
      packed[#packed + 1] = call('GETRANGE', check.key, s.offset, s.offset + bytes - 1)
    elseif is_small then
      packed[#packed + 1] = zeros(bytes)
    end
  end
  if is_small then
    for _, piece in ipairs(ring) do packed[#packed + 1] = piece end
    packed[#packed + 1] = zeros((check.capacity - check.charges) * 4)
  end
  check.entries = { unpack(check.segments) }
  check.room = room_for(#check.entries)
  local head = head_of(check)
  packed[1] = head .. zeros(HEAD_BYTES + check.room * SEGMENT_BYTES - #head)
  set(check.key, table.concat(packed), ttl(lasts(check)))
end

-- Extend a large key: clear the part of the ring that a new segment takes, and write the ring after it.
local function extend(check, ring, ends, is_new)
  local length = ends + check.capacity * 4
  written = written + max(length - call('STRLEN', check.key), 0)
  set_range(check.key, length - 1, '\0')
  if not is_new and ends > check.ring then
    local cleared, blank = min(ends, check.ring + check.old_capacity * 4), zeros(PIECE)
    for at = check.ring, cleared - 1, PIECE do
      set_range(check.key, at, at + PIECE <= cleared and blank or zeros(cleared - at))
    end
  end
  for _, piece in ipairs(ring) do
    set_range(check.key, ends, piece)
    ends = ends + #piece
  end
end

-- Change the layout of the key after a segment was added or dropped, or the ring grew.
local function lay_out(check)
  local ring, live, dropped = ring_of(check), 0, 0
  for _, s in ipairs(check.entries) do
    if s.hashes > 0 then live = live + s.blocks else dropped = dropped + s.blocks end
  end
  local is_small = live * BLOCK_BYTES + check.capacity * 4 < LARGE
  local is_new = is_small or dropped > live or room_for(#check.entries) ~= check.room
  check.first = 0
  if is_new then rewrite(check, ring, is_small) end
  local ends = place(check)
  if not is_small then extend(check, ring, ends, is_new) end
  check.ring, check.old_capacity, check.changed = ends, check.capacity, false
end

local function drop_dead(check)
  local live = {}
  for _, s in ipairs(check.segments) do
    if is_live(check, s.written) then
      live[#live + 1] = s
    else
      s.hashes, check.changed = 0, true
    end
  end
  check.segments = live
end

local function add_segment(check, ids)
  local left, share = 1, 1
  for _, s in ipairs(check.segments) do left = left - 2 ^ -s.share end
  while 2 ^ -share > left / 2 and share < #SHARES do share = share + 1 end
  local hashes, load = SHARES[share][1], SHARES[share][2]
  local blocks = ceil(ids / load)
  local segment = {
    ids = ids, share = share, hashes = hashes, blocks = blocks + ceil(sqrt(blocks)), written = 0,
    counts = { [0] = 0, 0, 0, 0 },
  }
  check.segments[#check.segments + 1] = segment
  check.entries[#check.entries + 1] = segment
  check.changed = true
end

-- The ids per layer of the first segment, and of the segment after a full one (app/domain/shape.py).
local function first_segment(limit)
  return min(max(SMALLEST_SEGMENT, ceil(limit / 3)), FIRST_SEGMENT, max_ids)
end

local function step(first, limit)
  for steps = STEPS, 2, -1 do
    local grows = 3
    while first * grows ^ steps < limit do grows = grows + 0.25 end
    if grows >= LEAST_STEP then return grows end
  end
  return max(3, limit / first)
end

local function next_segment(ids, limit)
  local size = first_segment(limit)
  local grows = step(size, limit)
  while size < 2 * ids and size < limit do size = min(ceil(size * grows), limit) end
  return min(size >= 2 * ids and size or ids * GROWTH, max_ids)
end

local function begin_layer(check, at)
  local number = check.number + 1
  check.number, check.starts[number % LAYERS] = number, at
  for _, s in ipairs(check.segments) do s.counts[number % LAYERS] = 0 end
  drop_dead(check)
  return number
end

-- Whether this many more ids in the open layer (or in the next one, if none is open) need a new segment.
local function is_short(check, ids)
  local number, s = open_layer(check), check.segments[#check.segments]
  if not s then return true end
  if number then return s.counts[number % LAYERS] + ids > s.ids end
  -- one more layer pushes out the oldest, and the newest segment with it if nothing was written there since
  return s.written <= check.number + 1 - LAYERS or not is_live(check, s.written) or ids > s.ids
end

-- The open layer; begins one if no layer is open.
local function opened_layer(check)
  return open_layer(check) or begin_layer(check, check.t)
end

-- Set an id's cells in the newest segment, in the given live layer, or else in the open one.
local function write(check, id, number)
  check.base = check.base or check.t
  check.last = check.last or check.t
  number = number or opened_layer(check)
  local s = check.segments[#check.segments]
  if not s then
    add_segment(check, first_segment(check.limit))
  elseif s.counts[number % LAYERS] >= s.ids then
    local ids = next_segment(s.ids, check.limit)
    drop_dead(check)
    add_segment(check, ids)
  end
  s = check.segments[#check.segments]
  if check.changed then lay_out(check) end
  local at = block_of(s, id)
  local block = call('GETRANGE', check.key, at, at + BLOCK_BYTES - 1)
  local words = { unpack_(BLOCK, block) }
  local written = words[1]
  if written < number then
    local keep = 0
    for old = max(number - LAYERS + 1, 1), written do keep = bor(keep, lshift(1, old % LAYERS)) end
    keep = keep * 17
    keep = keep * 0x01010101
    for i = 2, #words do words[i] = band(words[i], keep) end
  end
  words[1] = max(written, number)
  local slot, left = lshift(1, number % LAYERS), s.hashes
  for word = 2, 8 do
    local fraction = id[word]
    for _ = 1, min(left, 3) do
      fraction = fraction * CELLS
      local cell = floor(fraction / WORD)
      fraction = fraction - cell * WORD
      local i = floor(cell / 8) + 2
      words[i] = bor(words[i], lshift(slot, cell % 8 * 4))
    end
    left = left - 3
  end
  set_range(check.key, at, pack(BLOCK, unpack(words)))
  check.missing = check.missing - 1
  s.counts[number % LAYERS] = s.counts[number % LAYERS] + 1
  s.written = max(s.written, number)
  check.dirty = true
end

-- Look up every id before any is written: list the unseen ids, and the seen ids that are not in the open layer yet.
-- `missing` counts both, less the ids written since.
local function look_up(check)
  check.looked_up = true
  shorten(check.unseen, 0)
  shorten(check.stale, 0)
  local open, newest = open_layer(check), #check.segments
  for i = 0, check.ids - 1 do
    local id = spare_id
    id[1], id[2], id[3], id[4], id[5], id[6], id[7], id[8] = unpack_(SPREAD, ask, check.ids_at + i * 32)
    id.place = i + 1
    local segment, layer = find(check, id)
    local list = not segment and check.unseen or (segment ~= newest or layer ~= open) and check.stale
    if list then
      list[#list + 1] = id
      spare_id = {}
    end
  end
  check.missing = #check.unseen + #check.stale
end

-- How long (ms) until enough charges have left the window for the unseen ids to fit. Charges leave in order.
local function wait_for_rate(check, unseen)
  return charged_at(check, check.charges + unseen - check.limit - 1) + check.window - now
end

local function wait_for_capacity(check)
  for number = max(check.number - LAYERS + 1, 1), check.number do
    if is_live(check, number) and remembered_by(check, number) > 0 then
      return check.starts[number % LAYERS] + check.layer_ttl - now
    end
  end
end

function producer_ids.judge(check)
  if not check.looked_up then look_up(check) end
  local unseen = #check.unseen
  if unseen == 0 then return ADMIT, 0 end
  local alive = charged(check)
  if mode == RECORD then
    if check.limit == 0 then return DELAY, check.window end
    if alive + unseen <= check.limit then return ADMIT, 0 end
    -- One more id fits once a charge leaves: one of those made now, or an earlier one.
    local leaving = alive + unseen - check.limit
    local since = leaving >= alive and check.t or charged_at(check, check.charges - alive + leaving)
    return DELAY, min(since + check.window - now, MAX_THROTTLE_MS)
  end
  local largest = min(check.limit, max_ids)
  if unseen > largest then return REJECT, 0, TOO_LARGE, largest end
  local rate, capacity = 0, 0
  if alive + unseen > check.limit then rate = wait_for_rate(check, unseen) end
  if remembered(check) + unseen > max_ids then capacity = wait_for_capacity(check) end
  local grows = alive + unseen > check.capacity or is_short(check, unseen + #check.stale)
  if grows and check.newest and mode == ADMIT_MODE and is_full() then capacity = max(capacity, FULL_MS) end
  if rate == 0 and capacity == 0 then return ADMIT, 0 end
  return THROTTLE, min(max(rate, capacity), MAX_THROTTLE_MS), capacity > rate and CAPACITY or 0, -unseen
end

function producer_ids.move(check, by, writing)
  check.base, check.last, check.newest = check.base + by, check.last + by, check.newest + by
  for slot = 0, 3 do check.starts[slot] = check.starts[slot] + by end
  if writing then write_head(check) end
end

-- Note the outcome of an id for the log.
local function note(check, id, outcome)
  check.id_outcomes = check.id_outcomes or {}
  check.id_outcomes[id.place] = outcome
end

function producer_ids.touch(check)
  for _, id in ipairs(check.stale) do
    local segment, layer = find(check, id) -- again: ids written since may have changed this
    local is_stale = segment and (segment ~= #check.segments or layer ~= open_layer(check))
    if is_stale and not (is_short(check, 1) and is_full()) then
      local counts = check.segments[segment].counts
      counts[layer % LAYERS] = max(counts[layer % LAYERS] - 1, 0)
      write(check, id)
      if logged then note(check, id, REFRESHED) end
    end
  end
  if check.dirty then write_head(check) end
end

-- Write known ids to the open layer, uncharged: refresh seen ids as any ask does, and restore lost ids as long as there
-- is room for them.
function producer_ids.renew(check)
  look_up(check)
  producer_ids.touch(check)
  for _, id in ipairs(check.unseen) do
    if remembered(check) < max_ids and not (is_short(check, 1) and is_full()) then
      write(check, id)
      if logged then note(check, id, REFRESHED) end
    end
  end
  if check.dirty then write_head(check) end
end

-- Add n charges at time t to the ring; make_room must have made room for them.
local function add_charges(check, n)
  local entry = pack('<I4', (check.t - check.base) % WORD)
  local straight = min(n, check.capacity - (check.first + check.charges) % check.capacity)
  local at = check.ring + (check.first + check.charges) % check.capacity * 4
  set_range(check.key, at, string.rep(entry, straight))
  if straight < n then set_range(check.key, check.ring, string.rep(entry, n - straight)) end
  check.charges, check.last = check.charges + n, check.t
  check.alive = check.charges
end

-- The capacity of a ring for this many charges: grow by a quarter, but not beyond the limit while within it.
local function room_of(check, charges)
  local room = ceil(check.capacity * 1.25)
  if charges <= check.limit then room = min(room, check.limit) end
  return min(max(charges, room), max_ids)
end

-- Make room for n charges: drop the dead ones and, beyond max_ids, the oldest. In a full store, an existing ring does
-- not grow. Returns how many fit.
local function make_room(check, n)
  local alive, most = charged(check), max_ids
  if alive + n > check.capacity and check.newest and is_full() then most = check.capacity end
  n = min(n, most)
  local stay = min(alive, most - n)
  if check.charges > stay then
    check.first = (check.first + check.charges - stay) % check.capacity
    check.charges = stay
  end
  check.alive = stay
  if stay + n > check.capacity then
    check.capacity = room_of(check, stay + n)
    check.changed = true
  end
  return n
end

function producer_ids.charge(check)
  producer_ids.touch(check)
  if #check.unseen == 0 then return false end
  if logged then
    for _, id in ipairs(check.unseen) do note(check, id, CHARGED) end
  end
  check.base = check.base or check.t
  check.last = check.last or check.t
  local n = make_room(check, #check.unseen)
  local function is_closed() return check.newest and is_short(check, 1) and is_full() end
  if remembered(check) < max_ids and not is_closed() then
    opened_layer(check) -- which may push out an older layer with its ids
    local ids = remembered(check)
    for i = 1, min(#check.unseen, max_ids - ids) do
      if is_closed() then break end
      write(check, check.unseen[i])
    end
  end
  if check.changed then lay_out(check) end
  if n > 0 then add_charges(check, n) end
  write_head(check)
  return true
end

function producer_ids.report(check)
  local alive, ids, layers = charged(check), remembered(check)
  local newest, fill = check.segments[#check.segments], 0
  if newest then fill = newest.counts[check.number % LAYERS] / newest.ids end
  if check.outcome ~= REJECT and mode ~= PEEK and check.ids > 0 and check.missing == 0 then
    check.largest = check.starts[check.number % LAYERS] + check.interval - check.t
  end
  return alive, min(check.limit - alive, max(max_ids - ids, 0)), ids, fill, layers
end
