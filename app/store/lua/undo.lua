--[[ The births of buckets and stamps of charges for undo (app/domain/undo.py has the rules and the reasons);
follows call.lua.

An ask whose buckets are in several slots is charged slot by slot. If a later slot refuses it, the earlier charges are
undone. A bucket charged by such an ask has a birth: a number that it keeps until its charges can no longer be given
back exactly. Other buckets have no birth in their state.

Charge   <d d d>   of the answer to a stamped ask, for each quota: the bucket's birth (0: it cannot be undone), the time
                   of the charge in the bucket (ms), the units that it took
         16 bytes  the history (history.lua)
Stamp    <d d> and 16 bytes  of an ask in mode undo, for each quota: the birth, the time and the history of the charge
Example  a charge of 4 into a new bucket at 1763719742123 ms: <7340121, 1763719742123, 4> and '8c1e5a3b90d2f647'
]]

local BIRTHS = 16777216 -- births are whole numbers below this, so that they fit next to a count of samples

local function history_now()
  history = history or history_of_server()
  return history
end

-- Give the bucket a birth that it never had: by the store's clock, in microseconds.
local function bear(check)
  clock = clock or call('TIME')
  check.birth = (clock[1] % 16777216 * 1000000 + clock[2]) % (BIRTHS - 1) + 1
end

-- From here on earlier charges can no longer be undone.
local function end_birth(check)
  if check.birth > 0 then check.birth = check.birth % (BIRTHS - 1) + 1 end
end

local function read_stamp(check, at)
  check.undone_birth, check.undone_at, check.undone_in = unpack_('<ddc16', ask, at)
end

-- Whether the bucket still is the one that took the charge.
local function is_undoable(check)
  return check.birth > 0 and check.birth == check.undone_birth and check.undone_in == history_now()
    and check.undone_in ~= UNKNOWN_HISTORY
end

local function charges_of(checks, quotas)
  local packed = {}
  for i = 1, quotas do
    local check = checks[i]
    if check.algorithm.undo then
      packed[i] = pack('<ddd', check.birth, check.t, check.took)
    else -- ids are charged in the last slot, so they are never undone
      packed[i] = pack('<ddd', 0, check.t, 0)
    end
  end
  return table.concat(packed) .. history_now()
end
