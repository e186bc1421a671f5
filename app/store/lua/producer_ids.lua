--[[ Layered Bloom filters and the exact trailing count (app/domain/producer_ids.py says what and why).

State    <d d I4 d d d d I4 I4 I4 I4>  base time, time of the newest charge, number of the newest layer, start times
                         of the four layers (slot = number mod 4), ring: capacity, first, charges; segments
         <I4 B B I4 I4 I4 I4 I4 I4>  for each segment, oldest first: ids a layer, share, hashes, blocks,
                         layer written last, ids by the newest layer that holds them (by slot);
                         a segment dropped in place has no hashes; room for 4, 16, 64, ... of these
         segments        blocks of 256 bytes: <I4> number of the layer that wrote it last, then 504 cells of 4 bits,
                         one for each slot; cell 2i is the low half of byte i
         ring            <I4> for each charge: its time less the base, mod 2^32 (kept charges span less than that)
A block is scrubbed of the layers that died since it was written when it is written next; a reader masks them.
A key is made whole by one SET when its layout changes, as growing in place doubles a small allocation. A large one
would take long to copy, and grows by 1 MiB only: it is extended where the ring was, and its ring moves to the end.
]]

local HEAD, SEGMENT, BLOCK = '<ddI4ddddI4I4I4I4', '<I4BBI4I4I4I4I4I4', '<' .. string.rep('I4', 64)
local HEAD_BYTES, SEGMENT_BYTES, WORD = 68, 30, 4294967296
local LARGE = 4194304
local PIECE = 65536
local producer_ids = {}

-- How many segments there is room for in the head of a key that has so many.
local function room_for(segments)
  local room = 4
  while room < segments do room = room * 4 end
  return room
end

function producer_ids.load(part)
  part.window, part.interval, part.layer_ttl = part.a, part.b, part.c
  part.clock_window = part.window
  part.segments, part.entries = {}, {}
  local packed = call('GETRANGE', part.key, 0, HEAD_BYTES + room_for(0) * SEGMENT_BYTES - 1)
  if #packed < HEAD_BYTES then
    part.base, part.last, part.number, part.starts = nil, nil, 0, { [0] = 0, 0, 0, 0 }
    part.capacity, part.first, part.charges, part.room = 0, 0, 0, 0
    return
  end
  local entries
  part.starts = {}
  part.base, part.last, part.number, part.starts[0], part.starts[1], part.starts[2], part.starts[3],
    part.capacity, part.first, part.charges, entries = unpack_(HEAD, packed)
  part.room, part.old_capacity = room_for(entries), part.capacity
  local offset = HEAD_BYTES + part.room * SEGMENT_BYTES
  if #packed < offset then packed = call('GETRANGE', part.key, 0, offset - 1) end
  for i = 1, entries do
    local s = { counts = {}, offset = offset }
    s.ids, s.share, s.hashes, s.blocks, s.written, s.counts[0], s.counts[1], s.counts[2], s.counts[3] =
      unpack_(SEGMENT, packed, HEAD_BYTES + (i - 1) * SEGMENT_BYTES + 1)
    part.entries[i] = s
    if s.hashes > 0 then part.segments[#part.segments + 1] = s end
    offset = offset + s.blocks * BLOCK_BYTES
  end
  part.ring = offset
  part.newest = -huge
  if part.number > 0 then part.newest = part.starts[part.number % LAYERS] end
  if part.charges > 0 then part.newest = max(part.newest, part.last) end
end

local function head_of(part)
  local packed = { pack(HEAD, part.base, part.last, part.number, part.starts[0], part.starts[1], part.starts[2],
    part.starts[3], part.capacity, part.first, part.charges, #part.entries) }
  for i, s in ipairs(part.entries) do
    packed[i + 1] = pack(SEGMENT, s.ids, s.share, s.hashes, s.blocks, s.written,
      s.counts[0], s.counts[1], s.counts[2], s.counts[3])
  end
  return table.concat(packed)
end

local function lasts(part)
  local dies = -huge
  if part.number > 0 then dies = part.starts[part.number % LAYERS] + part.layer_ttl end
  if part.charges > 0 then dies = max(dies, part.last + part.window) end
  return max(dies - part.now, 0)
end

local function write_head(part)
  set_range(part.key, 0, head_of(part))
  call('PEXPIRE', part.key, ttl(lasts(part)))
end

-- The time of the i-th charge, oldest first, from 0.
local function charged_at(part, i)
  local at = part.ring + (part.first + i) % part.capacity * 4
  local entry = unpack_('<I4', call('GETRANGE', part.key, at, at + 3))
  return part.last - (part.last - part.base - entry) % WORD
end

-- How many charges lie in the trailing window; they are in order of time.
local function charged(part)
  if part.charges == 0 or part.t - part.last >= part.window then return 0 end
  local dead, alive = 0, part.charges - 1
  if part.t - charged_at(part, 0) < part.window then return part.charges end
  while alive - dead > 1 do
    local middle = floor((dead + alive) / 2)
    if part.t - charged_at(part, middle) < part.window then alive = middle else dead = middle end
  end
  return part.charges - alive
end

local function is_live(part, number)
  return number > 0 and number > part.number - LAYERS and part.t - part.starts[number % LAYERS] < part.layer_ttl
end

local function open_layer(part)
  if part.number > 0 and part.t - part.starts[part.number % LAYERS] < part.interval then return part.number end
end

local function remembered_by(part, number)
  local ids = 0
  for _, s in ipairs(part.segments) do ids = ids + s.counts[number % LAYERS] end
  return ids
end

-- How many ids the live layers hold, and how many layers these are.
local function remembered(part)
  local ids, layers = 0, 0
  for number = max(part.number - LAYERS + 1, 1), part.number do
    if is_live(part, number) then ids, layers = ids + remembered_by(part, number), layers + 1 end
  end
  return ids, layers
end

local function block_of(s, id)
  return s.offset + floor(id[1] * s.blocks / WORD) * BLOCK_BYTES
end

-- The slots whose bits are set in all cells of an id; a stranger is told by the first few.
local function slots_of(s, id, block)
  local slots, left = 15, s.hashes
  for word = 2, 8 do
    local fraction = id[word]
    for _ = 1, min(left, 3) do
      fraction = fraction * CELLS
      local cell = floor(fraction / WORD)
      fraction = fraction - cell * WORD
      local pair = string.byte(block, 5 + floor(cell / 2))
      slots = band(slots, cell % 2 == 0 and pair or floor(pair / 16))
      if slots == 0 then return 0 end
    end
    left = left - 3
  end
  return slots
end

-- Where an id is, the newest segment first: the segment's place, and the newest live layer that holds it.
local function find(part, id)
  for i = #part.segments, 1, -1 do
    local s = part.segments[i]
    local at = block_of(s, id)
    local block = call('GETRANGE', part.key, at, at + BLOCK_BYTES - 1)
    local slots = slots_of(s, id, block)
    if slots > 0 then
      local written = unpack_('<I4', block)
      for number = written, max(written - LAYERS + 1, 1), -1 do
        if band(slots, lshift(1, number % LAYERS)) > 0 and is_live(part, number) then return i, number end
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

-- The entries of the live charges, oldest first, in pieces: copies of megabytes cost more than their parts.
local function ring_of(part)
  local pieces = {}
  local function read(from, entries)
    for at = from, from + entries * 4 - 1, PIECE do
      pieces[#pieces + 1] = call('GETRANGE', part.key, at, min(at + PIECE, from + entries * 4) - 1)
    end
  end
  if part.charges > 0 then
    local straight = min(part.charges, part.old_capacity - part.first)
    read(part.ring + part.first * 4, straight)
    read(part.ring, part.charges - straight)
  end
  return pieces
end

-- Where the segments of a key end; new ones get their places.
local function place(part)
  local at = HEAD_BYTES + part.room * SEGMENT_BYTES
  for _, s in ipairs(part.entries) do
    s.offset = at
    at = at + s.blocks * BLOCK_BYTES
  end
  return at
end

-- Make the key whole: its head, segments that stay and, if it is small, new empty ones and the ring.
local function rewrite(part, ring, is_small)
  local packed = { '' }
  for _, s in ipairs(part.segments) do
    local bytes = s.blocks * BLOCK_BYTES
    if s.offset then
      packed[#packed + 1] = call('GETRANGE', part.key, s.offset, s.offset + bytes - 1)
    elseif is_small then
      packed[#packed + 1] = zeros(bytes)
    end
  end
  if is_small then
    for _, piece in ipairs(ring) do packed[#packed + 1] = piece end
    packed[#packed + 1] = zeros((part.capacity - part.charges) * 4)
  end
  part.entries = { unpack(part.segments) }
  part.room = room_for(#part.entries)
  local head = head_of(part)
  packed[1] = head .. zeros(HEAD_BYTES + part.room * SEGMENT_BYTES - #head)
  set(part.key, table.concat(packed), ttl(lasts(part)))
end

-- Make a large key longer: what the ring leaves to a new segment is cleared, and the ring follows it.
local function extend(part, ring, ends, is_new)
  local length = ends + part.capacity * 4
  written = written + max(length - call('STRLEN', part.key), 0)
  set_range(part.key, length - 1, '\0')
  if not is_new and ends > part.ring then
    local cleared, blank = min(ends, part.ring + part.old_capacity * 4), zeros(PIECE)
    for at = part.ring, cleared - 1, PIECE do
      set_range(part.key, at, at + PIECE <= cleared and blank or zeros(cleared - at))
    end
  end
  for _, piece in ipairs(ring) do
    set_range(part.key, ends, piece)
    ends = ends + #piece
  end
end

-- Lay the key out anew after a segment came or went, or the ring grew.
local function lay_out(part)
  local ring, live, dropped = ring_of(part), 0, 0
  for _, s in ipairs(part.entries) do
    if s.hashes > 0 then live = live + s.blocks else dropped = dropped + s.blocks end
  end
  local is_small = live * BLOCK_BYTES + part.capacity * 4 < LARGE
  local is_new = is_small or dropped > live or room_for(#part.entries) ~= part.room
  part.first = 0
  if is_new then rewrite(part, ring, is_small) end
  local ends = place(part)
  if not is_small then extend(part, ring, ends, is_new) end
  part.ring, part.old_capacity, part.changed = ends, part.capacity, false
end

local function drop_dead(part)
  local live = {}
  for _, s in ipairs(part.segments) do
    if is_live(part, s.written) then
      live[#live + 1] = s
    else
      s.hashes, part.changed = 0, true
    end
  end
  part.segments = live
end

local function add_segment(part, ids)
  local left, share = 1, 1
  for _, s in ipairs(part.segments) do left = left - 2 ^ -s.share end
  while 2 ^ -share > left / 2 and share < #SHARES do share = share + 1 end
  local hashes, load = SHARES[share][1], SHARES[share][2]
  local blocks = ceil(ids / load)
  local segment = {
    ids = ids, share = share, hashes = hashes, blocks = blocks + ceil(sqrt(blocks)), written = 0,
    counts = { [0] = 0, 0, 0, 0 },
  }
  part.segments[#part.segments + 1] = segment
  part.entries[#part.entries + 1] = segment
  part.changed = true
end

-- How many ids a layer of the first segment holds, and of the one that follows a full one (app/domain/shape.py).
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

local function begin_layer(part, at)
  local number = part.number + 1
  part.number, part.starts[number % LAYERS] = number, at
  for _, s in ipairs(part.segments) do s.counts[number % LAYERS] = 0 end
  drop_dead(part)
  return number
end

-- Whether so many more ids in the open layer, which is begun if there is none, need a new segment.
local function is_short(part, ids)
  local number, s = open_layer(part), part.segments[#part.segments]
  if not s then return true end
  if number then return s.counts[number % LAYERS] + ids > s.ids end
  -- one more layer pushes out the oldest, and the newest segment with it if nothing was written there since
  return s.written <= part.number + 1 - LAYERS or not is_live(part, s.written) or ids > s.ids
end

-- The open layer, begun if there is none.
local function opened_layer(part)
  return open_layer(part) or begin_layer(part, part.t)
end

-- Set an id's cells in the newest segment's part of a live layer, which is the open one unless it is given.
local function write(part, id, number)
  part.base = part.base or part.t
  part.last = part.last or part.t
  number = number or opened_layer(part)
  local s = part.segments[#part.segments]
  if not s then
    add_segment(part, first_segment(part.limit))
  elseif s.counts[number % LAYERS] >= s.ids then
    local ids = next_segment(s.ids, part.limit)
    drop_dead(part)
    add_segment(part, ids)
  end
  s = part.segments[#part.segments]
  if part.changed then lay_out(part) end
  local at = block_of(s, id)
  local block = call('GETRANGE', part.key, at, at + BLOCK_BYTES - 1)
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
  set_range(part.key, at, pack(BLOCK, unpack(words)))
  s.counts[number % LAYERS] = s.counts[number % LAYERS] + 1
  s.written = max(s.written, number)
  part.dirty = true
end

-- Look every id up before any is written: which are unseen, and which seen ones are not in the open layer yet.
local function look(part)
  part.unseen, part.stale = {}, {}
  local open, newest = open_layer(part), #part.segments
  for i = 0, part.ids - 1 do
    local id = { unpack_('<I4I4I4I4I4I4I4I4', part.ask, part.ids_at + i * 32) }
    id.place = i + 1
    local segment, layer = find(part, id)
    if not segment then
      part.unseen[#part.unseen + 1] = id
    elseif segment ~= newest or layer ~= open then
      part.stale[#part.stale + 1] = id
    end
  end
end

-- Until so many charges have left the window that the unseen ids fit; they leave in order.
local function wait_for_rate(part, unseen)
  return charged_at(part, part.charges + unseen - part.limit - 1) + part.window - part.now
end

local function wait_for_capacity(part)
  for number = max(part.number - LAYERS + 1, 1), part.number do
    if is_live(part, number) and remembered_by(part, number) > 0 then
      return part.starts[number % LAYERS] + part.layer_ttl - part.now
    end
  end
end

function producer_ids.judge(part)
  if not part.unseen then look(part) end
  local unseen = #part.unseen
  if unseen == 0 then return ADMIT, 0 end
  local alive = charged(part)
  if part.mode == RECORD then
    if part.limit == 0 then return DELAY, part.window end
    if alive + unseen <= part.limit then return ADMIT, 0 end
    -- for one id more to fit, a charge must leave that is one of those now made, or an earlier one
    local leaving = alive + unseen - part.limit
    local since = leaving >= alive and part.t or charged_at(part, part.charges - alive + leaving)
    return DELAY, min(since + part.window - part.now, MAX_THROTTLE_MS)
  end
  local largest = min(part.limit, max_ids)
  if unseen > largest then return REJECT, 0, TOO_LARGE, largest end
  local rate, capacity = 0, 0
  if alive + unseen > part.limit then rate = wait_for_rate(part, unseen) end
  if remembered(part) + unseen > max_ids then capacity = wait_for_capacity(part) end
  local grows = alive + unseen > part.capacity or is_short(part, unseen + #part.stale)
  if grows and part.newest and part.mode == ADMIT_MODE and is_full() then capacity = max(capacity, FULL_MS) end
  if rate == 0 and capacity == 0 then return ADMIT, 0 end
  return THROTTLE, min(max(rate, capacity), MAX_THROTTLE_MS), capacity > rate and CAPACITY or 0
end

function producer_ids.move(part, by, writing)
  part.base, part.last, part.newest = part.base + by, part.last + by, part.newest + by
  for slot = 0, 3 do part.starts[slot] = part.starts[slot] + by end
  if writing then write_head(part) end
end

-- What the log is told of an id.
local function became(part, id, what)
  part.became = part.became or {}
  part.became[id.place] = what
end

function producer_ids.touch(part)
  for _, id in ipairs(part.stale) do
    local segment, layer = find(part, id)
    local is_stale = segment and (segment ~= #part.segments or layer ~= open_layer(part))
    if is_stale and not (is_short(part, 1) and is_full()) then
      local counts = part.segments[segment].counts
      counts[layer % LAYERS] = max(counts[layer % LAYERS] - 1, 0)
      write(part, id)
      if logged then became(part, id, REFRESHED) end
    end
  end
  if part.dirty then write_head(part) end
end

-- Add charges to the ring: the dead are forgotten, and of more than max_ids the oldest.
local function add_charges(part, n)
  local entry = pack('<I4', (part.t - part.base) % WORD)
  local straight = min(n, part.capacity - (part.first + part.charges) % part.capacity)
  local at = part.ring + (part.first + part.charges) % part.capacity * 4
  set_range(part.key, at, string.rep(entry, straight))
  if straight < n then set_range(part.key, part.ring, string.rep(entry, n - straight)) end
  part.charges, part.last = part.charges + n, part.t
end

-- How many charges the ring is made for when it is to hold so many: a quarter more, but within the limit no more
-- than that.
local function room_of(part, charges)
  local room = ceil(part.capacity * 1.25)
  if charges <= part.limit then room = min(room, part.limit) end
  return min(max(charges, room), max_ids)
end

-- Make room for so many charges, or for as many as a full store lets the ring hold; how many it is.
local function make_room(part, n)
  local alive, most = charged(part), max_ids
  if alive + n > part.capacity and part.newest and is_full() then most = part.capacity end
  n = min(n, most)
  local stay = min(alive, most - n)
  if part.charges > stay then
    part.first = (part.first + part.charges - stay) % part.capacity
    part.charges = stay
  end
  if stay + n > part.capacity then
    part.capacity = room_of(part, stay + n)
    part.changed = true
  end
  return n
end

function producer_ids.charge(part)
  producer_ids.touch(part)
  if #part.unseen == 0 then return false end
  if logged then
    for _, id in ipairs(part.unseen) do became(part, id, CHARGED) end
  end
  part.base = part.base or part.t
  part.last = part.last or part.t
  local n = make_room(part, #part.unseen)
  local function is_closed() return part.newest and is_short(part, 1) and is_full() end
  if remembered(part) < max_ids and not is_closed() then
    opened_layer(part) -- which may push out an older one, and what it holds
    local ids = remembered(part)
    for i = 1, min(#part.unseen, max_ids - ids) do
      if is_closed() then break end
      write(part, part.unseen[i])
    end
  end
  if part.changed then lay_out(part) end
  if n > 0 then add_charges(part, n) end
  write_head(part)
  return true
end

function producer_ids.shows(part)
  local alive, ids, layers = charged(part), remembered(part)
  local newest, fill = part.segments[#part.segments], 0
  if newest then fill = newest.counts[part.number % LAYERS] / newest.ids end
  return alive, min(part.limit - alive, max(max_ids - ids, 0)), ids, fill, layers
end
